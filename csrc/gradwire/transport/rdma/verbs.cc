#include "gradwire/transport/rdma/verbs.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

// Returns the last error of dlopen or dlvsym, for messages.
std::string loader_says() {
  const char* said = ::dlerror();
  return said == nullptr ? "no reason given" : said;
}

class Loader {
 public:
  explicit Loader(const std::string& library)
      : handle_(::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr)
      throw InvalidArgument("the RDMA library does not load (" + loader_says() +
                            "): install libibverbs1 and the provider of the device (Debian: "
                            "ibverbs-providers; others: rdma-core)");
  }

  // Resolves one function by name and version, since two functions of libibverbs may have one name.
  template <typename Function>
  void find(Function& function, const char* name, const char* version) const {
    void* found = ::dlvsym(handle_, name, version);
    if (found == nullptr)
      throw InvalidArgument("the RDMA library is too old, or another one (" + loader_says() +
                            "): gradwire needs " + name + "@" + version +
                            ", which rdma-core has since version 32");
    function = reinterpret_cast<Function>(found);
  }

 private:
  void* handle_;  // never closed: its devices may be open until the process ends
};

Verbs resolve(const std::string& library) {
  const Loader loader(library);
  Verbs v{};
  v.library = library;
  constexpr const char* kFirst = "IBVERBS_1.0";
  constexpr const char* kUsual = "IBVERBS_1.1";
  loader.find(v.fork_init, "ibv_fork_init", kUsual);
  loader.find(v.get_device_list, "ibv_get_device_list", kUsual);
  loader.find(v.free_device_list, "ibv_free_device_list", kUsual);
  loader.find(v.open_device, "ibv_open_device", kUsual);
  loader.find(v.close_device, "ibv_close_device", kUsual);
  loader.find(v.query_device, "ibv_query_device", kUsual);
  loader.find(v.query_port, "ibv_query_port", kUsual);
  loader.find(v.query_gid_ex, "_ibv_query_gid_ex", "IBVERBS_1.11");
  loader.find(v.alloc_pd, "ibv_alloc_pd", kUsual);
  loader.find(v.dealloc_pd, "ibv_dealloc_pd", kUsual);
  loader.find(v.reg_mr, "ibv_reg_mr", kUsual);
  loader.find(v.dereg_mr, "ibv_dereg_mr", kUsual);
  loader.find(v.create_comp_channel, "ibv_create_comp_channel", kFirst);
  loader.find(v.destroy_comp_channel, "ibv_destroy_comp_channel", kFirst);
  loader.find(v.create_cq, "ibv_create_cq", kUsual);
  loader.find(v.destroy_cq, "ibv_destroy_cq", kUsual);
  loader.find(v.get_cq_event, "ibv_get_cq_event", kUsual);
  loader.find(v.ack_cq_events, "ibv_ack_cq_events", kUsual);
  loader.find(v.create_qp, "ibv_create_qp", kUsual);
  loader.find(v.modify_qp, "ibv_modify_qp", kUsual);
  loader.find(v.destroy_qp, "ibv_destroy_qp", kUsual);
  loader.find(v.wc_status_str, "ibv_wc_status_str", kUsual);
  v.fork_init();  // before any device is opened: a fork must not part the device
                  // from registered memory
  return v;
}

}  // namespace

const Verbs& Verbs::load(const std::string& library) {
  static std::mutex mutex;
  static std::map<std::string, Verbs> loaded;
  std::lock_guard lock(mutex);
  const auto found = loaded.find(library);
  return found != loaded.end() ? found->second
                               : loaded.emplace(library, resolve(library)).first->second;
}

}  // namespace gradwire::transport
