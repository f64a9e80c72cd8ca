#include "gradwire/transport/rdma/verbs.h"

#include <map>
#include <mutex>

#include "gradwire/base/error.h"

namespace gradwire::transport {

Verbs::VersionedFinder::VersionedFinder(const std::string& library)
    : handle(::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle == nullptr)
    throw InvalidArgument("the RDMA library does not load (" + loader_error() +
                          "): install libibverbs1 and the provider of the device (Debian: "
                          "ibverbs-providers; others: rdma-core)");
}

Symbol Verbs::VersionedFinder::operator()(const char* name, const char* version) const {
  const Symbol found{::dlvsym(handle, name, version)};
  if (found.address == nullptr)
    throw InvalidArgument("the RDMA library is too old, or another one (" + loader_error() +
                          "): gradwire needs " + name + "@" + version +
                          ", which rdma-core has since version 32");
  return found;
}

// fork_init() comes before any device is opened: a fork must not part the device from registered
// memory.
Verbs::Verbs(const std::string& library) : find(library) { fork_init(); }

const Verbs& Verbs::load(const std::string& library) {
  static std::mutex mutex;
  static std::map<std::string, Verbs> loaded;
  const std::lock_guard lock(mutex);
  return loaded.try_emplace(library, library).first->second;
}

}  // namespace gradwire::transport
