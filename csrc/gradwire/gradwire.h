// gradwire for C++ programs, which link the CMake target `gradwire` (docs/install.md). This header
// is the public one: what it declares, and of what it includes the public members of Communicator,
// Request, Array, Work, UniqueFd and the errors. Everything else under gradwire/ is internal, and
// changes without notice.
//
// Any thread may use a communicator. What a caller can cause is thrown as one of the errors of
// base/error.h, and a failed rank ends all calls, on all ranks, with an error that names it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/base/fd.h"
#include "gradwire/exec/communicator.h"

namespace gradwire {

using exec::Array;
using exec::Communicator;
using exec::Request;

// Connected stream sockets to one peer, which the program has authenticated.
struct PeerSockets {
  UniqueFd control, collective, point_to_point;
};
// The sockets of one rank, by peer; its own are empty.
using RankSockets = std::vector<PeerSockets>;

// Returns Unix sockets that join so many ranks of this host, by rank: threads of this process, or
// processes that it forks. A process closes those of the other ranks.
std::vector<RankSockets> connected_sockets(int ranks);

struct Joining {
  // "shm" for processes or threads of one host and "inproc" for threads of one process, both over
  // Unix sockets; "tcp" over TCP. The same on all ranks.
  std::string_view transport = "shm";
  double timeout = 60;  // seconds to wait for the other ranks
  // The ranks of each host, by which algorithm "auto" chooses; empty: all are on one.
  std::vector<std::vector<Rank>> hosts = {};
};

// Makes a rank's communicator. Blocks until the peers do so, too; throws Timeout where one does
// not, and InvalidArgument where a peer's socket is missing.
std::unique_ptr<Communicator> join(Rank rank, RankSockets sockets, const Joining& joining = {});

// The DType of a C++ type.
template <typename T>
consteval DType dtype_of() {
  constexpr bool kSigned = std::is_signed_v<T>;
  if constexpr (std::is_same_v<T, bool>) return DType::kBool;
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, double>) return DType::kFloat64;
  static_assert(std::is_arithmetic_v<T> && sizeof(T) <= 8, "no element type of gradwire");
  if constexpr (sizeof(T) == 1) return kSigned ? DType::kInt8 : DType::kUInt8;
  if constexpr (sizeof(T) == 2) return kSigned ? DType::kInt16 : DType::kUInt16;
  if constexpr (sizeof(T) == 4) return kSigned ? DType::kInt32 : DType::kUInt32;
  return kSigned ? DType::kInt64 : DType::kUInt64;
}

struct AllReduce {
  ReduceOp op = ReduceOp::kSum;
  std::string_view algorithm = "auto";  // or "ring", "tree", …
  std::string_view codec = "none";      // or "int8", "topk:density=0.01", …: float32 alone
  // What a lossy codec does not deliver, kept under this key and added to the next call that has
  // it. Null: it is lost.
  std::shared_ptr<codec::ErrorFeedback> feedback = nullptr;
  std::string key = "array";
  double timeout = 300;  // seconds, from when the call starts to run
};

// Reduces an array over all ranks, in place. All make the same call; blocks until it is over. For
// other collectives, and for calls that do not block, pass a Request to Communicator::run() and
// submit().
void all_reduce(Communicator& communicator, DType dtype, Array array, const AllReduce& options);
template <typename T>
void all_reduce(Communicator& communicator, std::span<T> array, const AllReduce& options = {}) {
  all_reduce(communicator, dtype_of<T>(),
             {reinterpret_cast<std::byte*>(array.data()), array.size()}, options);
}

}  // namespace gradwire
