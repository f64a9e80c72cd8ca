// Device memory that other processes map: a file in memory, which they open through /proc.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "fibers.h"
#include "simulated_cuda.h"
#include "streams.h"

namespace simulated {
namespace {

constexpr std::size_t kPage = 4096, kLeast = 16 * kPage;  // smaller memory is not exported

struct Exported {
  int file = -1;
  std::size_t bytes = 0;
};
struct Handle {
  int process = 0;
  int file = -1;
  std::size_t bytes = 0;
};

std::map<void*, std::size_t> pages;  // that can be exported, and their bytes
std::map<void*, Exported> exported;
std::map<void*, std::size_t> mapped;

bool can_share() {
  const char* told = std::getenv("SIMULATED_CUDA_IPC");
  return told == nullptr || std::string(told) != "0";
}

// Puts a file in the place of the pages, with what is there.
Exported share(void* address, std::size_t bytes) {
  const int file = ::memfd_create("simulated device memory", MFD_CLOEXEC);
  if (file < 0 || ::pwrite(file, address, bytes, 0) != static_cast<ssize_t>(bytes) ||
      ::mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != address)
    fatal("no memory that can be shared");
  return {file, bytes};
}

}  // namespace

void* allocate_pages(std::size_t bytes) {
  if (bytes < kLeast) return std::malloc(bytes);
  bytes = (bytes + kPage - 1) / kPage * kPage;
  void* address = std::aligned_alloc(kPage, bytes);
  if (address != nullptr) pages[address] = bytes;
  return address;
}

void free_pages(void* address) {
  if (const auto found = exported.find(address); found != exported.end()) {
    ::mmap(address, found->second.bytes, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    ::close(found->second.file);
    exported.erase(found);
  }
  pages.erase(address);
  std::free(address);
}

}  // namespace simulated

using namespace simulated;

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  const std::lock_guard lock(device_lock());
  if (!can_share()) return cudaErrorNotSupported;
  const auto found = pages.find(address);
  if (found == pages.end()) return cudaErrorInvalidValue;
  if (!exported.contains(address)) exported[address] = share(address, found->second);
  const Handle told{::getpid(), exported[address].file, found->second};
  *handle = {};
  std::memcpy(handle->reserved, &told, sizeof told);
  return cudaSuccess;
}

// As CUDA, it opens none of this process.
cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
  const std::lock_guard lock(device_lock());
  Handle told;
  std::memcpy(&told, handle.reserved, sizeof told);
  if (!can_share()) return cudaErrorNotSupported;
  if (told.process == ::getpid()) return cudaErrorDeviceUninitialized;
  const std::string path =
      "/proc/" + std::to_string(told.process) + "/fd/" + std::to_string(told.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return cudaErrorInvalidValue;
  void* found = ::mmap(nullptr, told.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (found == MAP_FAILED) return cudaErrorInvalidValue;
  mapped[found] = told.bytes;
  *address = found;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* address) {
  const std::lock_guard lock(device_lock());
  const auto found = mapped.find(address);
  if (found == mapped.end()) return cudaErrorInvalidValue;
  ::munmap(address, found->second);
  mapped.erase(found);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (device < 0 || peer < 0 || device >= count || peer >= count) return cudaErrorInvalidDevice;
  *can = device != peer && can_share() ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return can_share() ? cudaSuccess : cudaErrorNotSupported;
}
