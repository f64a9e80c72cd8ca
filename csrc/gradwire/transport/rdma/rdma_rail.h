// An RDMA transport's resources on one port: its registered memory, and the completion queue.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>
#include <string>

#include "gradwire/transport/rdma/rdma_devices.h"

namespace gradwire::transport {

// Pages that a fork does not copy: the device and this process must go on seeing the same ones.
class Slab {
 public:
  explicit Slab(std::size_t bytes);
  ~Slab() { ::munmap(memory_, bytes_); }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  std::byte* data() const noexcept { return static_cast<std::byte*>(memory_); }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::size_t bytes_;
  void* memory_;
};

class Rail {
 public:
  // Room for so many completions at a time. Throws Error naming the verb that failed, and what to
  // do where it is the memory.
  Rail(const RdmaDevices& devices, const RdmaPort& port, const Slab& slab, int completions);

  const RdmaPort& port() const noexcept { return port_; }
  ibv::Cq* cq() const noexcept { return cq_.get(); }
  const ibv::Mr& memory() const noexcept { return *memory_; }

  // The next completions, as many as fit; throws Error where the device fails.
  std::size_t poll(std::span<ibv::Wc> found) const;

  // Readable when a completion has come since arm().
  int bell() const noexcept { return channel_->fd; }
  void arm();
  void hush();

 private:
  const Verbs& verbs_;
  const RdmaPort& port_;
  Owned<ibv::Mr> memory_;
  Owned<ibv::CompChannel> channel_;
  Owned<ibv::Cq> cq_;
};

}  // namespace gradwire::transport
