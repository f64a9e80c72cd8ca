// The device: memory, streams, events, copies.
#include <cstring>

#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {
namespace {

Status said(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();  // reported here: no later call may see it
  return static_cast<Status>(error);
}

cudaMemcpyKind kind_of(CopyKind kind) {
  switch (kind) {
    case CopyKind::kToDevice:
      return cudaMemcpyHostToDevice;
    case CopyKind::kToHost:
      return cudaMemcpyDeviceToHost;
    default:
      return cudaMemcpyDeviceToDevice;
  }
}

const char* describe(Status status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

Status versions(int* runtime, int* driver) {
  const cudaError_t first = cudaRuntimeGetVersion(runtime);
  return said(first != cudaSuccess ? first : cudaDriverGetVersion(driver));
}

Status device_count(int* count) {
  *count = 0;
  return said(cudaGetDeviceCount(count));
}

Status device_info(int device, DeviceInfo* info) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return said(error);
  *info = {};
  std::memcpy(info->name, properties.name, sizeof info->name);
  info->major = properties.major;
  info->minor = properties.minor;
  info->memory = properties.totalGlobalMem;
  std::memcpy(info->uuid, properties.uuid.bytes, sizeof info->uuid);
  return said(cudaDeviceGetPCIBusId(info->bus_id, sizeof info->bus_id, device));
}

Status set_device(int device) { return said(cudaSetDevice(device)); }
Status get_device(int* device) { return said(cudaGetDevice(device)); }

// Only the driver can tell without initialising the device.
int is_in_use(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* active);
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found,
                                                             12000, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || found == nullptr) return 1;
  unsigned flags = 0;
  int active = 1;
  return reinterpret_cast<GetState>(found)(device, &flags, &active) == 0 ? active : 1;
}

Status device_of(const void* address, int* device) {
  cudaPointerAttributes found;
  const cudaError_t error = cudaPointerGetAttributes(&found, address);
  const bool on_device = found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged;
  *device = error == cudaSuccess && on_device ? found.device : -1;
  return said(error);
}

Status allocate(void** address, std::size_t bytes) { return said(cudaMalloc(address, bytes)); }
Status release(void* address) { return said(cudaFree(address)); }
Status allocate_host(void** address, std::size_t bytes) {
  return said(cudaHostAlloc(address, bytes, cudaHostAllocDefault));
}
Status release_host(void* address) { return said(cudaFreeHost(address)); }

Status create_stream(Stream* stream) {
  int least = 0, greatest = 0;
  const cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (error != cudaSuccess) return said(error);
  return said(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, greatest));
}
Status destroy_stream(Stream stream) { return said(cudaStreamDestroy(stream)); }
Status synchronize(Stream stream) { return said(cudaStreamSynchronize(stream)); }
Status synchronize_device() { return said(cudaDeviceSynchronize()); }

Status relax_captures() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  return said(cudaThreadExchangeStreamCaptureMode(&mode));
}

Status capture_of(Stream stream, std::uint64_t* capture) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id);
  *capture = error == cudaSuccess && status == cudaStreamCaptureStatusActive ? id : 0;
  return said(error);
}

Status create_event(Event* event) {
  return said(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
}
Status destroy_event(Event event) { return said(cudaEventDestroy(event)); }
Status record(Event event, Stream stream) { return said(cudaEventRecord(event, stream)); }
Status wait(Stream stream, Event event) { return said(cudaStreamWaitEvent(stream, event, 0)); }

// In any other capture mode, this would break a capture that is under way on any thread.
Status query(Event event, int* done) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t error = cudaEventQuery(event);
  cudaThreadExchangeStreamCaptureMode(&mode);
  *done = error == cudaSuccess ? 1 : 0;
  if (error == cudaErrorNotReady) {
    cudaGetLastError();
    return 0;
  }
  return said(error);
}

Status copy(void* to, const void* from, std::size_t bytes, CopyKind kind, Stream stream) {
  return bytes == 0 ? 0 : said(cudaMemcpyAsync(to, from, bytes, kind_of(kind), stream));
}
Status fill(void* to, int byte, std::size_t bytes, Stream stream) {
  return bytes == 0 ? 0 : said(cudaMemsetAsync(to, byte, bytes, stream));
}
Status call_host(Stream stream, void (*function)(void*), void* argument) {
  return said(cudaLaunchHostFunc(stream, function, argument));
}

}  // namespace

void fill_runtime(Api& api) {
  api.describe = describe;
  api.versions = versions;
  api.device_count = device_count;
  api.device_info = device_info;
  api.set_device = set_device;
  api.get_device = get_device;
  api.is_in_use = is_in_use;
  api.device_of = device_of;
  api.allocate = allocate;
  api.release = release;
  api.allocate_host = allocate_host;
  api.release_host = release_host;
  api.create_stream = create_stream;
  api.destroy_stream = destroy_stream;
  api.synchronize = synchronize;
  api.synchronize_device = synchronize_device;
  api.relax_captures = relax_captures;
  api.capture_of = capture_of;
  api.create_event = create_event;
  api.destroy_event = destroy_event;
  api.record = record;
  api.wait = wait;
  api.query = query;
  api.copy = copy;
  api.fill = fill;
  api.call_host = call_host;
}

}  // namespace gradwire::cuda
