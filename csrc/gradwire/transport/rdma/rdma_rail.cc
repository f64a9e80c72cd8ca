#include "gradwire/transport/rdma/rdma_rail.h"

#include <fcntl.h>

#include <cerrno>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

[[noreturn]] void fail(const RdmaPort& port, const std::string& verb, int error) {
  throw Error(system_message(port.describe() + ": " + verb, error));
}

ibv::Mr* register_memory(const Verbs& verbs, const RdmaPort& port, const Slab& slab) {
  ibv::Mr* made =
      verbs.reg_mr(port.pd, slab.data(), slab.bytes(), ibv::kLocalWrite | ibv::kRemoteWrite);
  if (made != nullptr) return made;
  const std::string mib = std::to_string((slab.bytes() + (1 << 20) - 1) >> 20);
  fail(port,
       "ibv_reg_mr of " + mib +
           " MiB (raise the memory-lock limit: `ulimit -l unlimited`; or do without: "
           "GRADWIRE_TRANSPORT=shm,tcp)",
       errno);
}

ibv::CompChannel* make_channel(const Verbs& verbs, const RdmaPort& port) {
  ibv::CompChannel* made = verbs.create_comp_channel(port.context);
  if (made == nullptr) fail(port, "ibv_create_comp_channel", errno);
  ::fcntl(made->fd, F_SETFL, ::fcntl(made->fd, F_GETFL) | O_NONBLOCK);
  return made;
}

ibv::Cq* make_cq(const Verbs& verbs, const RdmaPort& port, ibv::CompChannel* channel, int entries) {
  ibv::Cq* made = verbs.create_cq(port.context, entries, nullptr, channel, 0);
  if (made == nullptr)
    fail(port, "ibv_create_cq for " + std::to_string(entries) + " completions", errno);
  return made;
}

}  // namespace

Slab::Slab(std::size_t bytes)
    : bytes_(bytes),
      memory_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
  if (memory_ == MAP_FAILED) throw Error(system_message("mmap for RDMA", errno));
  ::madvise(memory_, bytes_, MADV_DONTFORK);
}

Rail::Rail(const RdmaDevices& devices, const RdmaPort& port, const Slab& slab, int completions)
    : verbs_(devices.verbs()),
      port_(port),
      memory_(register_memory(verbs_, port, slab), verbs_.dereg_mr),
      channel_(make_channel(verbs_, port), verbs_.destroy_comp_channel),
      cq_(make_cq(verbs_, port, channel_.get(), completions), verbs_.destroy_cq) {}

std::size_t Rail::poll(std::span<ibv::Wc> found) const {
  const int count =
      cq_->context->ops.poll_cq(cq_.get(), static_cast<int>(found.size()), found.data());
  if (count < 0) fail(port_, "ibv_poll_cq", errno);
  return at(count);
}

void Rail::arm() {
  disarm();
  const int error = cq_->context->ops.req_notify_cq(cq_.get(), 0);
  if (error != 0) fail(port_, "ibv_req_notify_cq", error);
}

void Rail::disarm() {
  ibv::Cq* rung = nullptr;
  void* context = nullptr;
  while (verbs_.get_cq_event(channel_.get(), &rung, &context) == 0) verbs_.ack_cq_events(rung, 1);
}

}  // namespace gradwire::transport
