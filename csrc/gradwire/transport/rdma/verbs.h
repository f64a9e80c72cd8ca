// Verbs: the functions of libibverbs, which is loaded at run time, so that one build works with and
// without it. poll_cq, post_send and the like are no symbols of the library: each device's context
// has its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gradwire/base/dynamic_library.h"
#include "gradwire/base/fork.h"
#include "gradwire/transport/rdma/verbs_abi.h"

namespace gradwire::transport {

struct Verbs {
  static constexpr const char* kLibrary = "libibverbs.so.1";

  // Loads the library, once for each name. Throws InvalidArgument, with the remedy, where it is
  // absent or lacks a function in the version that is needed.
  static const Verbs& load(const std::string& library = kLibrary);

  explicit Verbs(const std::string& library);

  // Finds a function of the library, which is loaded first. Throws as load() does.
  struct VersionedFinder {
    explicit VersionedFinder(const std::string& library);
    // By name and version, since two functions of libibverbs may have one name.
    Symbol operator()(const char* name, const char* version = "IBVERBS_1.1") const;

    void* handle;  // never closed: its devices may be open until the process ends
  } find;

  int (*fork_init)() = find("ibv_fork_init");
  ibv::Device** (*get_device_list)(int* count) = find("ibv_get_device_list");
  void (*free_device_list)(ibv::Device** list) = find("ibv_free_device_list");
  ibv::Context* (*open_device)(ibv::Device* device) = find("ibv_open_device");
  int (*close_device)(ibv::Context* context) = find("ibv_close_device");
  int (*query_device)(ibv::Context* context, ibv::DeviceAttr* found) = find("ibv_query_device");
  int (*query_port)(ibv::Context* context, std::uint8_t port,
                    ibv::PortAttr* found) = find("ibv_query_port");
  int (*query_gid_ex)(ibv::Context* context, std::uint32_t port, std::uint32_t index,
                      ibv::GidEntry* found, std::uint32_t flags,
                      std::size_t entry_size) = find("_ibv_query_gid_ex", "IBVERBS_1.11");
  ibv::Pd* (*alloc_pd)(ibv::Context* context) = find("ibv_alloc_pd");
  int (*dealloc_pd)(ibv::Pd* pd) = find("ibv_dealloc_pd");
  ibv::Mr* (*reg_mr)(ibv::Pd* pd, void* address, std::size_t bytes,
                     int access) = find("ibv_reg_mr");
  int (*dereg_mr)(ibv::Mr* mr) = find("ibv_dereg_mr");
  ibv::CompChannel* (*create_comp_channel)(ibv::Context* context) = find("ibv_create_comp_channel",
                                                                         "IBVERBS_1.0");
  int (*destroy_comp_channel)(ibv::CompChannel* channel) = find("ibv_destroy_comp_channel",
                                                                "IBVERBS_1.0");
  ibv::Cq* (*create_cq)(ibv::Context* context, int entries, void* cq_context,
                        ibv::CompChannel* channel, int vector) = find("ibv_create_cq");
  int (*destroy_cq)(ibv::Cq* cq) = find("ibv_destroy_cq");
  int (*get_cq_event)(ibv::CompChannel* channel, ibv::Cq** cq,
                      void** cq_context) = find("ibv_get_cq_event");
  void (*ack_cq_events)(ibv::Cq* cq, unsigned count) = find("ibv_ack_cq_events");
  ibv::Qp* (*create_qp)(ibv::Pd* pd, ibv::QpInitAttr* wanted) = find("ibv_create_qp");
  int (*modify_qp)(ibv::Qp* qp, ibv::QpAttr* wanted, int mask) = find("ibv_modify_qp");
  int (*destroy_qp)(ibv::Qp* qp) = find("ibv_destroy_qp");
  const char* (*wc_status_str)(int status) = find("ibv_wc_status_str");
};

// Releases a resource, but not in a fork: there the handle is a copy, and releasing it would take
// the resource from the parent.
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
