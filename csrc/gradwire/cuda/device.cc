#include "gradwire/cuda/device.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "gradwire/base/run_with_timeout.h"

namespace gradwire::cuda {
namespace {

constexpr const char* kFileName = "libgradwire_cuda.so";
constexpr double kRestSeconds = 5;

// The devices, as bits, for which await_device() failed last.
std::atomic<std::uint64_t> restless = 0;

std::uint64_t bit_of(int device) {
  return std::uint64_t{1} << (static_cast<unsigned>(device) % 64);
}

std::string loader_says() {
  const char* said = ::dlerror();
  return said == nullptr ? "no reason given" : said;
}

const Api& open_library(const std::string& path) {
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed
  if (handle == nullptr)
    throw InvalidArgument(
        "gradwire's CUDA part does not load (" + loader_says() +
        "): build gradwire with it, GRADWIRE_CUDA=ON pip install . where there is "
        "an nvcc, or name the file in GRADWIRE_CUDA_SO");
  const auto get = reinterpret_cast<GetApi>(::dlsym(handle, kGetApi));
  if (get == nullptr)
    throw InvalidArgument(path + " is not gradwire's CUDA part: it has no " + kGetApi);
  const Api& api = *get();
  if (api.version != kApiVersion || api.bytes != sizeof(Api))
    throw InvalidArgument(path + " is of another version of gradwire: it has table " +
                          std::to_string(api.version) + " of " + std::to_string(api.bytes) +
                          " bytes, and " + std::to_string(kApiVersion) + " of " +
                          std::to_string(sizeof(Api)) + " is needed; build both together");
  return api;
}

}  // namespace

std::string api_path() {
  if (const char* given = std::getenv("GRADWIRE_CUDA_SO"); given != nullptr && *given != '\0')
    return given;
  Dl_info here{};
  if (::dladdr(reinterpret_cast<const void*>(&api_path), &here) == 0) return kFileName;
  const std::string core = here.dli_fname;
  const std::size_t slash = core.rfind('/');
  return slash == std::string::npos ? kFileName : core.substr(0, slash + 1) + kFileName;
}

const Api& load_api(const std::string& library) {
  static std::mutex mutex;
  static std::map<std::string, const Api*> loaded;
  const std::string path = library.empty() ? api_path() : library;
  const std::lock_guard lock(mutex);
  const auto found = loaded.find(path);
  if (found != loaded.end()) return *found->second;
  return *loaded.emplace(path, &open_library(path)).first->second;
}

void check(const Api& api, Status status, const char* what) {
  if (status == 0) return;
  throw CudaError(std::string(what) + ": " + api.describe(status) + " (" + std::to_string(status) +
                  ")");
}

std::uint64_t capture_of(const Api& api, Stream stream) {
  std::uint64_t capture = 0;
  check(api, api.capture_of(stream, &capture), "cudaStreamGetCaptureInfo");
  return capture;
}

OnDevice::OnDevice(const Api& api, int device) : api_(api), device_(device) {
  check(api, api.get_device(&before_), "cudaGetDevice");
  if (before_ != device) check(api, api.set_device(device), "cudaSetDevice");
}

OnDevice::~OnDevice() {
  if (before_ != device_ && api_.is_in_use(before_) != 0) api_.set_device(before_);
}

std::future<Status> synchronize_apart(const Api& api, int device) {
  std::packaged_task<Status()> task([&api, device] {
    api.set_device(device);
    api.relax_captures();
    return api.synchronize_device();
  });
  std::future<Status> status = task.get_future();
  std::thread(std::move(task)).detach();
  return status;
}

void await_device(const Api& api) noexcept {
  int device = 0;
  if (api.get_device(&device) == 0) await_device(api, device);
}

void await_device(const Api& api, int device) noexcept {
  bool rests = false;
  try {
    const auto well = std::make_shared<std::atomic<bool>>(false);
    const bool in_time = run_with_timeout(kRestSeconds, [&api, device, well] {
      api.set_device(device);
      api.relax_captures();
      *well = api.synchronize_device() == 0;
    });
    rests = in_time && *well;
  } catch (const std::exception&) {  // no thread could be started
  }
  if (rests)
    restless &= ~bit_of(device);
  else
    restless |= bit_of(device);
}

Room::~Room() {
  for (void* each : outgrown_) release(each);
  if (data_ != nullptr) release(data_);
}

void Room::release(void* data) noexcept {
  if ((restless & bit_of(device_)) != 0) return;
  (kind_ == MemoryKind::kDevice ? api_->release : api_->release_host)(data);
}

std::byte* Room::take(std::size_t bytes, const CallStream& stream) {
  if (bytes <= bytes_) return data_;
  if (stream.is_captured())
    throw InvalidArgument(
        "a call that is captured in a CUDA graph can't allocate: make the same call "
        "once before the capture begins");
  const bool on_device = kind_ == MemoryKind::kDevice;
  if (data_ != nullptr)
    bytes = std::max(bytes, bytes_ + bytes_ / 2);  // so that it is seldom outgrown
  check(*api_, api_->get_device(&device_), "cudaGetDevice");
  void* fresh = nullptr;
  check(*api_, (on_device ? api_->allocate : api_->allocate_host)(&fresh, bytes),
        on_device ? "cudaMalloc" : "cudaHostAlloc");
  if (data_ != nullptr) outgrown_.push_back(data_);
  data_ = static_cast<std::byte*>(fresh);
  bytes_ = bytes;
  return data_;
}

}  // namespace gradwire::cuda
