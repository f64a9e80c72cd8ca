// Messages: how one rank's GPU exchanges bytes with other ranks'. What is posted between begin()
// and end() is one group: end() enqueues all of it on a stream, so that it reads what was there
// before on that stream, and what comes after finds it done: all of its bytes have arrived, and its
// memory is free again. Several messages of a group between the same two ranks match in their
// order.
//
// Three implementations: NCCL (messages_nccl.h), virtual ranks in one process
// (messages_loopback.h), the CPU transports (messages_host.h). Belongs to one thread at a time;
// abort() is for any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "gradwire/base/types.h"
#include "gradwire/cuda/api.h"

namespace gradwire::cuda {

class Messages {
 public:
  virtual ~Messages() = default;

  virtual std::string_view name() const noexcept = 0;
  // Whether fewer bytes travel where `used` says so.
  virtual bool exact(Rank /*peer*/) const noexcept { return false; }

  virtual void begin() = 0;
  // `used`: in device memory, how many of the bytes count, read when the message's turn comes on
  // the stream; null, or not exact: all of them.
  virtual void send(const std::byte* data, std::size_t bytes, Rank peer,
                    const std::uint64_t* used = nullptr) = 0;
  // Of an exact message as many bytes as were sent, at most `bytes`.
  virtual void receive(std::byte* data, std::size_t bytes, Rank peer) = 0;
  // Throws TransportError, Timeout or Aborted as the CPU transports do; then nothing more may be
  // posted.
  virtual void end(Stream stream) = 0;

  // Throws what has failed since, on the stream.
  virtual void check() = 0;
  // What is enqueued comes to its end, whatever the peers do; later calls throw Aborted.
  virtual void abort() noexcept = 0;
};

}  // namespace gradwire::cuda
