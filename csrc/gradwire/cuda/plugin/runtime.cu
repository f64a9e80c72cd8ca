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

Status create_stream(Stream* stream) {
  int least = 0, greatest = 0;
  const cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (error != cudaSuccess) return said(error);
  return said(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, greatest));
}
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

void fill_streams(Api& api) {
  api.create_stream = create_stream;
  api.destroy_stream = [](Stream stream) { return said(cudaStreamDestroy(stream)); };
  api.synchronize = [](Stream stream) { return said(cudaStreamSynchronize(stream)); };
  api.relax_captures = relax_captures;
  api.capture_of = capture_of;
  api.create_event = [](Event* event) {
    return said(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  };
  api.destroy_event = [](Event event) { return said(cudaEventDestroy(event)); };
  api.record = [](Event event, Stream stream) { return said(cudaEventRecord(event, stream)); };
  api.wait = [](Stream stream, Event event) { return said(cudaStreamWaitEvent(stream, event, 0)); };
  api.query = query;
  api.copy = [](void* to, const void* from, std::size_t n, CopyKind kind, Stream stream) {
    return n == 0 ? 0 : said(cudaMemcpyAsync(to, from, n, kind_of(kind), stream));
  };
  api.fill = [](void* to, int byte, std::size_t n, Stream stream) {
    return n == 0 ? 0 : said(cudaMemsetAsync(to, byte, n, stream));
  };
  api.call_host = [](Stream stream, void (*function)(void*), void* argument) {
    return said(cudaLaunchHostFunc(stream, function, argument));
  };
}

}  // namespace

void fill_runtime(Api& api) {
  api.describe = [](Status status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); };
  api.versions = [](int* runtime, int* driver) {
    const cudaError_t first = cudaRuntimeGetVersion(runtime);
    return said(first != cudaSuccess ? first : cudaDriverGetVersion(driver));
  };
  api.device_count = [](int* count) {
    *count = 0;
    return said(cudaGetDeviceCount(count));
  };
  api.device_info = device_info;
  api.set_device = [](int device) { return said(cudaSetDevice(device)); };
  api.get_device = [](int* device) { return said(cudaGetDevice(device)); };
  api.is_in_use = is_in_use;
  api.device_of = device_of;
  api.allocate = [](void** address, std::size_t n) { return said(cudaMalloc(address, n)); };
  api.release = [](void* address) { return said(cudaFree(address)); };
  api.allocate_host = [](void** address, std::size_t n) {
    return said(cudaHostAlloc(address, n, cudaHostAllocDefault));
  };
  api.release_host = [](void* address) { return said(cudaFreeHost(address)); };
  api.synchronize_device = [] { return said(cudaDeviceSynchronize()); };
  fill_streams(api);
}

}  // namespace gradwire::cuda
