// Rail: an RDMA transport's resources on one port, its registered memory and completion queue.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>
#include <string>

#include "gradwire/base/fork.h"
#include "gradwire/transport/rdma/rdma_devices.h"

namespace gradwire::transport {

// Anonymous memory that a fork does not copy, so that the device and this process keep sharing its
// pages.
class Slab {
 public:
  explicit Slab(std::size_t bytes);
  ~Slab() {
    if (!in_fork()) ::munmap(memory_, bytes_);
  }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  std::byte* data() const noexcept { return static_cast<std::byte*>(memory_); }
  std::size_t bytes() const noexcept { return bytes_; }
  bool in_fork() const noexcept { return made_after_ != forks(); }

 private:
  std::size_t bytes_;
  void* memory_;
  std::uint32_t made_after_ = forks();
};

class Rail {
 public:
  // `completions`: capacity of the completion queue. Throws Error, which names the verb that
  // failed.
  Rail(const RdmaDevices& devices, const RdmaPort& port, const Slab& slab, int completions);

  const RdmaPort& port() const noexcept { return port_; }
  ibv::Cq* cq() const noexcept { return cq_.get(); }
  const ibv::Mr& memory() const noexcept { return *memory_; }

  // Takes the next completions, as many as fit; returns their number. Throws Error where the device
  // fails.
  std::size_t poll(std::span<ibv::Wc> found) const;

  // Returns a descriptor that is readable when a completion has come since arm(). disarm() clears
  // it.
  int bell() const noexcept { return channel_->fd; }
  void arm();
  void disarm();

 private:
  const Verbs& verbs_;
  const RdmaPort& port_;
  Owned<ibv::Mr> memory_;
  Owned<ibv::CompChannel> channel_;
  Owned<ibv::Cq> cq_;
};

}  // namespace gradwire::transport
