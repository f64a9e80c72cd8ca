// Connection: an authenticated stream socket, with the keys of the handshake where what goes over
// it is sealed. One owner.
#pragma once

#include <memory>
#include <utility>

#include "gradwire/base/fd.h"
#include "gradwire/crypto/seal.h"

namespace gradwire::transport {

// The two borrowed.
struct Stream {
  int socket = -1;
  crypto::Seal* seal = nullptr;  // none: plain

  Stream(int borrowed, crypto::Seal* keys = nullptr)  // a plain socket is a stream, too
      : socket(borrowed), seal(keys) {}
};

struct Connection {
  UniqueFd socket;
  std::shared_ptr<crypto::Seal> seal;

  Connection() = default;
  Connection(UniqueFd owned, std::shared_ptr<crypto::Seal> keys = {})
      : socket(std::move(owned)), seal(std::move(keys)) {}

  bool valid() const noexcept { return socket.valid(); }
  Stream stream() const noexcept { return {socket.get(), seal.get()}; }
};

}  // namespace gradwire::transport
