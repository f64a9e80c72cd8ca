// A CUDA device simulated on the CPU, so that the plugin's kernels and the executor are tested
// where there is no GPU. Instead of <cuda_runtime.h>, under GRADWIRE_SIMULATED_CUDA.
//
// Kernels run thread by thread: every thread of a block is a fiber, and between two barriers they
// run one after the other in random order, in every other block one warp later than the others, so
// that what lacks a barrier gives wrong results. Blocks run in random order. Warps are of 32
// threads; the mask of a warp's operation must be of all of them, and block sizes multiples of 32.
// A barrier that some thread of the block never reaches ends the program with a message.
//
// Streams are queues. Nothing runs until somebody waits (cudaStreamSynchronize, cudaEventQuery,
// cudaFree): then operations run in random order, as far as streams and events let them, so that
// what lacks an event gives wrong results. Handles 1 and 2 are the default stream and this thread's
// own; a stream that was destroyed takes no event. SIMULATED_CUDA_SEED sets the order,
// SIMULATED_CUDA_DEVICES how many devices there are (1).
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
// Used: or else GCC 12 may take one that is written by way of a reference for a constant.
#define __shared__ static __attribute__((used))
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

struct CUstream_st;
struct CUevent_st;
#define CUDART_VERSION 13000
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureIsolation = 905,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaMemoryType {
  cudaMemoryTypeUnregistered,
  cudaMemoryTypeHost,
  cudaMemoryTypeDevice,
  cudaMemoryTypeManaged
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
  cudaStreamCaptureStatusInvalidated
};
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
};
struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  std::size_t totalGlobalMem;
  int major, minor;
};
inline constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2,
                          cudaHostAllocDefault = 0;
using cudaHostFn_t = void (*)(void*);

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetPCIBusId(char* to, int bytes, int device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
inline constexpr int cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address);
cudaError_t cudaMalloc(void** address, std::size_t bytes);  // filled with 0xCD
cudaError_t cudaFree(void* address);
cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* address);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* to, int byte, std::size_t bytes, cudaStream_t stream);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument);

namespace simulated {

int launch(cudaStream_t stream, unsigned blocks, unsigned threads, std::function<void()> thread);

void sync_threads();
unsigned lane();
// What all lanes of the warp gave, by lane; until the warp's next operation but one.
const std::uint64_t* exchange(unsigned mask, std::uint64_t mine);

template <typename T>
std::uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t word = 0;
  __builtin_memcpy(&word, &value, sizeof value);
  return word;
}
template <typename T>
T of_word(std::uint64_t word) {
  T value;
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}

}  // namespace simulated

inline void __syncthreads() { simulated::sync_threads(); }
int __syncthreads_or(int predicate);
int __syncthreads_and(int predicate);
int __syncthreads_count(int predicate);
inline void __syncwarp(unsigned mask = 0xFFFFFFFFU) { simulated::exchange(mask, 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int = 32) {
  return simulated::of_word<T>(simulated::exchange(mask, simulated::to_word(value))[lane & 31]);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with, int = 32) {
  return simulated::of_word<T>(
      simulated::exchange(mask, simulated::to_word(value))[simulated::lane() ^ with]);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int = 32) {
  const std::uint64_t* all = simulated::exchange(mask, simulated::to_word(value));
  const unsigned from = simulated::lane() + by;
  return from < 32 ? simulated::of_word<T>(all[from]) : value;
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int = 32) {
  const std::uint64_t* all = simulated::exchange(mask, simulated::to_word(value));
  const unsigned lane = simulated::lane();
  return lane >= by ? simulated::of_word<T>(all[lane - by]) : value;
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint64_t* all = simulated::exchange(mask, predicate != 0 ? 1 : 0);
  unsigned ballot = 0;
  for (unsigned i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(all[i]) << i;
  return ballot;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == 0xFFFFFFFFU;
}
unsigned __reduce_max_sync(unsigned mask, unsigned value);
unsigned __reduce_min_sync(unsigned mask, unsigned value);
unsigned __reduce_add_sync(unsigned mask, unsigned value);
unsigned __reduce_or_sync(unsigned mask, unsigned value);

template <typename T>
T simulated_change(T* at, T value) {
  const T before = *at;
  *at = value;
  return before;
}
template <typename T>
T atomicAdd(T* at, T value) {
  return simulated_change(at, static_cast<T>(*at + value));
}
template <typename T>
T atomicMax(T* at, T value) {
  return simulated_change(at, *at < value ? value : *at);
}
template <typename T>
T atomicMin(T* at, T value) {
  return simulated_change(at, value < *at ? value : *at);
}
template <typename T>
T atomicOr(T* at, T value) {
  return simulated_change(at, static_cast<T>(*at | value));
}
template <typename T>
T atomicExch(T* at, T value) {
  return simulated_change(at, value);
}
template <typename T>
T atomicCAS(T* at, T expected, T value) {
  return simulated_change(at, *at == expected ? value : *at);
}

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __ffsll(long long x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1;
}
unsigned __brev(unsigned x);
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>(((std::uint64_t{high} << 32) | low) >> (by & 31U));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>(((std::uint64_t{high} << 32) | low) << (by & 31U) >> 32);
}
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned long long __double_as_longlong(double x) {
  return std::bit_cast<unsigned long long>(x);
}
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
// Of the eight bytes of both words, y's behind x's, those that the nibbles of the selector number.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long both = x | static_cast<unsigned long long>(y) << 32;
  unsigned found = 0;
  for (unsigned i = 0; i < 4; ++i)
    found |= static_cast<unsigned>(both >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return found;
}
struct __half {
  unsigned short bits;
};
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
// To nearest even. Both give a NaN's one and only bits for any NaN, as a GPU does.
__half __float2half_rn(float x);
float __half2float(__half h);
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
template <typename T>
T __ldg(const T* at) {
  return *at;
}
inline long long clock64() { return 0; }

// ---- For tests: graphs, and what waits ----
extern "C" {
struct SimulatedGraph;
int simulated_cuda_begin_capture(cudaStream_t stream);
SimulatedGraph* simulated_cuda_end_capture(cudaStream_t stream);  // null: it was not captured
int simulated_cuda_launch_graph(SimulatedGraph* graph, cudaStream_t stream);
void simulated_cuda_free_graph(SimulatedGraph* graph);
// From now on operations and threads run in another random order.
void simulated_cuda_seed(std::uint64_t seed);
// Allocations of device and pinned memory so far, and operations enqueued so far.
std::uint64_t simulated_cuda_allocations();
std::uint64_t simulated_cuda_operations();
int simulated_cuda_priority(cudaStream_t stream);
// Kernels that this thread has launched so far.
std::uint64_t simulated_cuda_launches();
// Waits of the host for the device so far (cudaStreamSynchronize, cudaDeviceSynchronize).
std::uint64_t simulated_cuda_waits();
// For programs in Python: device memory, which goes when the device is done with it, and copies
// that the host waits for; null: the default stream.
void* simulated_cuda_allocate(std::size_t bytes);
void simulated_cuda_release(void* address);
void simulated_cuda_copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream);
// Nobody waits for it; `from` is read when the device comes to it.
void simulated_cuda_enqueue_copy(void* to, const void* from, std::size_t bytes,
                                 cudaStream_t stream);
// Nobody waits for it; `from` is free when this returns.
void simulated_cuda_put(void* to, const void* from, std::size_t bytes, cudaStream_t stream);
// A device that does nothing any more (on), as one that hangs, until it is set off.
void simulated_cuda_hang(int on);
}
