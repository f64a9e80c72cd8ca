#include "gradwire/gradwire.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace gradwire {
namespace {

void connect(UniqueFd& one, UniqueFd& other) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw Error(system_message("socketpair", errno));
  one.reset(ends[0]);
  other.reset(ends[1]);
}

void require_all(Rank rank, const RankSockets& sockets) {
  const int size = static_cast<int>(sockets.size());
  if (rank < 0 || rank >= size)
    throw InvalidArgument("rank " + std::to_string(rank) + " is none of " + std::to_string(size));
  for (Rank peer = 0; peer < size; ++peer) {
    const PeerSockets& to = sockets[at(peer)];
    if (peer != rank && !(to.control.valid() && to.collective.valid() && to.point_to_point.valid()))
      throw InvalidArgument("rank " + std::to_string(rank) + " lacks a socket to rank " +
                            std::to_string(peer));
  }
}

}  // namespace

std::vector<RankSockets> connected_sockets(int ranks) {
  if (ranks < 1) throw InvalidArgument(std::to_string(ranks) + " ranks: there must be one or more");
  std::vector<RankSockets> all(at(ranks));
  for (RankSockets& each : all) each.resize(at(ranks));
  for (Rank a = 0; a < ranks; ++a)
    for (Rank b = 0; b < a; ++b) {
      PeerSockets &one = all[at(a)][at(b)], &other = all[at(b)][at(a)];
      connect(one.control, other.control);
      connect(one.collective, other.collective);
      connect(one.point_to_point, other.point_to_point);
    }
  return all;
}

std::unique_ptr<Communicator> join(Rank rank, RankSockets sockets, const Joining& joining) {
  require_all(rank, sockets);
  const int size = static_cast<int>(sockets.size());
  auto made = std::make_unique<Communicator>(
      exec::Identity{.rank = rank, .size = size, .communicator = 0, .hosts = joining.hosts},
      exec::Tuning{});
  for (Rank peer = 0; peer < size; ++peer)
    if (peer != rank) made->adopt_control(std::move(sockets[at(peer)].control), peer);
  for (Rank peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const auto adopt = [&](exec::Lane lane, UniqueFd& socket) {
      made->adopt_link(lane, joining.transport, std::move(socket), peer, joining.timeout);
    };
    adopt(exec::Lane::kCollective, sockets[at(peer)].collective);
    adopt(exec::Lane::kPointToPoint, sockets[at(peer)].point_to_point);
  }
  return made;
}

void all_reduce(Communicator& communicator, DType dtype, Array array, const AllReduce& options) {
  Request request;
  request.collective = Collective::kAllReduce;
  request.dtype = dtype;
  request.op = options.op;
  request.algorithm = options.algorithm;
  request.timeout = options.timeout;
  request.inputs = request.outputs = {&array, 1};
  if (options.codec != "none") request.codec = codec::make_codec(options.codec);
  const codec::KeyedArray key{options.key, array.count};
  if (options.feedback) {
    request.feedback = options.feedback;
    request.keys = {&key, 1};
  }
  communicator.run(request);
}

}  // namespace gradwire
