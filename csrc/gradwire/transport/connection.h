// Connection: an authenticated stream socket with one owner, and the keys that seal its traffic;
// and further ones, by which tcp, alone, moves more at a time over a long way.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gradwire/base/fd.h"
#include "gradwire/crypto/seal.h"

namespace gradwire::transport {

// A Connection's socket and keys, borrowed.
struct Stream {
  int socket = -1;
  crypto::Seal* seal = nullptr;  // null: the traffic is plain

  Stream(int borrowed, crypto::Seal* keys = nullptr) : socket(borrowed), seal(keys) {}
};

class Ways;

// The numbers of a link's streams that carry messages, and of the ways over which they go.
struct StreamCounts {
  int streams = 1;
  int ways = 1;
};

struct Connection {
  UniqueFd socket;
  std::shared_ptr<crypto::Seal> seal;  // null: the traffic is plain
  std::vector<Connection> more;
  // Where a pair of ranks has several ways; the same object for all of their sockets.
  std::shared_ptr<Ways> ways;
  int way = 0;
  std::uint32_t generation = 0;  // how often the way had been made anew before
  int part = 0;                  // whose socket it is: kControlPart, or 1 + the link's lane
  bool acknowledges = false;     // carries acknowledgements and no messages

  Connection() = default;
  Connection(UniqueFd owned, std::shared_ptr<crypto::Seal> keys = {})
      : socket(std::move(owned)), seal(std::move(keys)) {}

  bool valid() const noexcept { return socket.valid(); }
  Stream stream() const noexcept { return {socket.get(), seal.get()}; }
  StreamCounts counts() const noexcept;
};

}  // namespace gradwire::transport
