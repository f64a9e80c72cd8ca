// shm: ranks of one host. The arenas are memfds passed over the Unix socket, so there is no name
// that could leak, and the memory of a killed rank goes with its last descriptor.
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/transport/memory/arena_transport.h"

namespace gradwire::transport {
namespace {

// One byte of payload that carries one descriptor.
struct DescriptorMessage {
  char payload = 'M';
  iovec part{&payload, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};

  DescriptorMessage() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;
};

void give_descriptor(int socket, const Arena& own, const LinkId& link) {
  const int descriptor = own.descriptor();
  DescriptorMessage message;
  cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof descriptor);
  std::memcpy(CMSG_DATA(control), &descriptor, sizeof descriptor);
  while (::sendmsg(socket, &message.header, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
    if (errno != EINTR)
      throw_transport_error(link, system_message("passing the shared memory", errno));
}

// Returns all descriptors that came with a message. Unwanted ones must be closed here too.
std::vector<UniqueFd> take_descriptors(msghdr& header) {
  std::vector<UniqueFd> received;
  const cmsghdr* control = CMSG_FIRSTHDR(&header);
  if (control == nullptr || control->cmsg_type != SCM_RIGHTS) return received;
  for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= control->cmsg_len; at += sizeof(int)) {
    int descriptor = -1;
    std::memcpy(&descriptor, reinterpret_cast<const char*>(control) + at, sizeof descriptor);
    received.emplace_back(descriptor);
  }
  return received;
}

UniqueFd receive_descriptor(int socket, const LinkId& link, const WaitLimit& wait_limit) {
  DescriptorMessage message;
  ssize_t got = 0;
  while ((got = ::recvmsg(socket, &message.header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)) < 0) {
    if (!would_block(errno))
      throw_transport_error(link, system_message("receiving the shared memory", errno));
    wait_ready(socket, POLLIN, link, wait_limit);
  }
  std::vector<UniqueFd> received = take_descriptors(message.header);
  if ((message.header.msg_flags & MSG_CTRUNC) != 0)
    throw_transport_error(link,
                          "this process has no file descriptor left for the peer's shared memory: "
                          "raise the limit (ulimit -n), or close some");
  if (got == 0 || received.size() != 1)
    throw_transport_error(link, "the peer passed no shared memory, or more than that");
  return std::move(received.front());
}

std::shared_ptr<Arena> take_descriptor(int socket, const std::shared_ptr<Arena>&,
                                       const LinkId& link, const LinkOptions& options,
                                       const WaitLimit& wait_limit) {
  return Arena::map(receive_descriptor(socket, link, wait_limit), link, options);
}

}  // namespace

extern constinit const TransportKind shm_kind{
    .name = "shm",
    .reach = Reach::kHost,
    .sockets = Sockets::kUnix,
    .make = [](const LinkOptions& options) -> std::unique_ptr<Transport> {
      return std::make_unique<ArenaTransport>("shm", options,
                                              ArenaExchange{give_descriptor, take_descriptor});
    },
    .open = open_shared_memory,
    .within_host = kMemoryCost,
    .between_hosts = kMemoryCost,
};

}  // namespace gradwire::transport
