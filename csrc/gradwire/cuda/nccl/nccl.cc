#include "gradwire/cuda/nccl/nccl.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "gradwire/base/error.h"

namespace gradwire::cuda {
namespace {

constexpr const char* kVariable = "GRADWIRE_NCCL_SO";
constexpr const char* kRemedy =
    ": pip install nvidia-nccl-cu13 (or -cu12, for a driver of CUDA 12), or name a libnccl.so.2 in "
    "GRADWIRE_NCCL_SO";

// Returns the last error of dlopen or dlsym, for messages.
std::string loader_says() {
  const char* said = ::dlerror();
  return said == nullptr ? "no reason given" : said;
}

struct OpenedNccl {
  void* handle = nullptr;  // never closed: its threads run until the process ends
  std::string origin;
};

// Tries one place after the other, and keeps the error of each.
class Search {
 public:
  std::optional<OpenedNccl> open(const std::string& file, const std::string& origin, int also = 0) {
    void* handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | also);
    if (handle != nullptr) return OpenedNccl{handle, origin};
    const std::string why = loader_says();  // dlopen has no error for one that is not loaded yet
    if ((also & RTLD_NOLOAD) == 0) said_ += (said_.empty() ? "" : "; ") + why;
    return std::nullopt;
  }
  const std::string& said() const noexcept { return said_; }

 private:
  std::string said_;
};

OpenedNccl open_named(const std::string& file) {
  Search search;
  if (auto found = search.open(file, kVariable)) return *std::move(found);
  throw InvalidArgument(std::string(kVariable) + "=" + file + " does not load (" + search.said() +
                        "): name a libnccl.so.2, or unset it");
}

OpenedNccl open_first(const std::vector<std::string>& files) {
  Search search;
  if (auto found = search.open(Nccl::kLibrary, "loaded already", RTLD_NOLOAD))
    return *std::move(found);
  for (const std::string& file : files)
    if (auto found = search.open(file, "pip's wheel")) return *std::move(found);
  if (auto found = search.open(Nccl::kLibrary, "the system's")) return *std::move(found);
  throw InvalidArgument("NCCL does not load (" + search.said() + ")" + kRemedy);
}

class Resolver {
 public:
  explicit Resolver(const OpenedNccl& opened) : handle_(opened.handle) {}

  template <typename Function>
  void find(Function& function, const char* name) {
    void* found = ::dlsym(handle_, name);
    if (found == nullptr)
      throw InvalidArgument("what was loaded is not NCCL, or not all of it (" + loader_says() +
                            "): gradwire needs its " + name + kRemedy);
    function = reinterpret_cast<Function>(found);
  }
  template <typename Function>
  void find_optional(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(handle_, name));
  }

 private:
  void* handle_;
};

std::string file_of(const void* symbol) {
  Dl_info found{};
  return ::dladdr(symbol, &found) == 0 || found.dli_fname == nullptr ? "" : found.dli_fname;
}

// Finds the version before any other function, so that an error about an old library names its
// version, not a missing symbol.
void find_version(Nccl& nccl, Resolver& resolver) {
  resolver.find(nccl.get_version, "ncclGetVersion");
  nccl.library = file_of(reinterpret_cast<const void*>(nccl.get_version));
  if (nccl.get_version(&nccl.version) != nccl::kSuccess)
    throw InvalidArgument(nccl.library + " does not tell its version" + kRemedy);
  if (nccl.version < Nccl::kOldest)
    throw InvalidArgument("NCCL " + version_text(nccl.version) + " (" + nccl.library +
                          ") is too old: " + version_text(Nccl::kOldest) +
                          " or newer can end a call whose peer is gone" + kRemedy);
}

Nccl resolve(const OpenedNccl& opened) {
  Resolver resolver(opened);
  Nccl n{};
  n.origin = opened.origin;
  find_version(n, resolver);
  resolver.find(n.get_unique_id, "ncclGetUniqueId");
  resolver.find(n.comm_init_rank_config, "ncclCommInitRankConfig");
  resolver.find(n.comm_get_async_error, "ncclCommGetAsyncError");
  resolver.find(n.comm_finalize, "ncclCommFinalize");
  resolver.find(n.comm_destroy, "ncclCommDestroy");
  resolver.find(n.comm_abort, "ncclCommAbort");
  resolver.find(n.group_start, "ncclGroupStart");
  resolver.find(n.group_end, "ncclGroupEnd");
  resolver.find(n.send, "ncclSend");
  resolver.find(n.recv, "ncclRecv");
  resolver.find(n.all_reduce, "ncclAllReduce");
  resolver.find(n.reduce_scatter, "ncclReduceScatter");
  resolver.find(n.all_gather, "ncclAllGather");
  resolver.find(n.broadcast, "ncclBroadcast");
  resolver.find(n.reduce, "ncclReduce");
  resolver.find_optional(n.all_to_all, "ncclAlltoAll");
  resolver.find(n.get_error_string, "ncclGetErrorString");
  resolver.find(n.get_last_error, "ncclGetLastError");
  return n;
}

}  // namespace

const Nccl& Nccl::load(const std::vector<std::string>& search) {
  static std::mutex mutex;
  static std::map<std::string, Nccl> loaded;
  const char* given = std::getenv(kVariable);
  const std::string named = given == nullptr ? "" : given;
  const std::lock_guard lock(mutex);
  const auto found = loaded.find(named);
  if (found != loaded.end()) return found->second;
  const OpenedNccl opened = named.empty() ? open_first(search) : open_named(named);
  return loaded.emplace(named, resolve(opened)).first->second;
}

// Decodes ncclGetVersion: major · 10000 + minor · 100 + patch since 2.9, major · 1000 + … before.
std::string version_text(int version) {
  const int major = version / (version < 10000 ? 1000 : 10000);
  const int minor = version / 100 % (version < 10000 ? 10 : 100);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

}  // namespace gradwire::cuda
