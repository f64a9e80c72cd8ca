// Verbs: the functions of libibverbs, which is loaded at run time, so that one build works with and
// without it. The functions that a device provides itself (poll_cq, post_send, ...) are called
// through its context.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gradwire/base/fork.h"
#include "gradwire/transport/rdma/verbs_abi.h"

namespace gradwire::transport {

struct Verbs {
  static constexpr const char* kLibrary = "libibverbs.so.1";

  // Loads the library, once for each name. Throws InvalidArgument, with the remedy, where it is
  // absent or lacks a function in the version that is needed.
  static const Verbs& load(const std::string& library = kLibrary);

  std::string library;

  int (*fork_init)();
  ibv::Device** (*get_device_list)(int* count);
  void (*free_device_list)(ibv::Device** list);
  ibv::Context* (*open_device)(ibv::Device* device);
  int (*close_device)(ibv::Context* context);
  int (*query_device)(ibv::Context* context, ibv::DeviceAttr* found);
  int (*query_port)(ibv::Context* context, std::uint8_t port, ibv::PortAttr* found);
  int (*query_gid_ex)(ibv::Context* context, std::uint32_t port, std::uint32_t index,
                      ibv::GidEntry* found, std::uint32_t flags, std::size_t entry_size);
  ibv::Pd* (*alloc_pd)(ibv::Context* context);
  int (*dealloc_pd)(ibv::Pd* pd);
  ibv::Mr* (*reg_mr)(ibv::Pd* pd, void* address, std::size_t bytes, int access);
  int (*dereg_mr)(ibv::Mr* mr);
  ibv::CompChannel* (*create_comp_channel)(ibv::Context* context);
  int (*destroy_comp_channel)(ibv::CompChannel* channel);
  ibv::Cq* (*create_cq)(ibv::Context* context, int entries, void* cq_context,
                        ibv::CompChannel* channel, int vector);
  int (*destroy_cq)(ibv::Cq* cq);
  int (*get_cq_event)(ibv::CompChannel* channel, ibv::Cq** cq, void** cq_context);
  void (*ack_cq_events)(ibv::Cq* cq, unsigned count);
  ibv::Qp* (*create_qp)(ibv::Pd* pd, ibv::QpInitAttr* wanted);
  int (*modify_qp)(ibv::Qp* qp, ibv::QpAttr* wanted, int mask);
  int (*destroy_qp)(ibv::Qp* qp);
  const char* (*wc_status_str)(int status);
};

// Gives a resource back, but not in a fork: there the handle is a copy, the kernel regards the
// resource as the parent's, and giving it back would take it from the parent.
template <typename Resource>
class Release {
 public:
  Release(int (*release)(Resource*)) : release_(release) {}
  void operator()(Resource* resource) const noexcept {
    if (made_after_ == forks()) release_(resource);
  }

 private:
  int (*release_)(Resource*);
  std::uint32_t made_after_ = forks();
};

// A libibverbs resource with one owner. A null one owns nothing.
template <typename Resource>
using Owned = std::unique_ptr<Resource, Release<Resource>>;

}  // namespace gradwire::transport
