// Devices, memory, streams, events and graphs.
#include "streams.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "fibers.h"
#include "simulated_cuda.h"

namespace {

using Action = std::function<void()>;

constexpr int kAtOnce = 20;  // operations that run while somebody asks for an event

struct Capture {
  std::uint64_t id = 0;
  cudaStream_t origin = nullptr;
  std::vector<Action> operations;  // in an order that streams and events allow
};

std::uint64_t number_from(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace

struct CUevent_st {
  int device = 0;
  std::uint64_t recorded = 0;       // how often, as enqueued
  std::set<std::uint64_t> pending;  // of these, on whatever streams
  Capture* capture = nullptr;       // in which it was last recorded

  bool is_over(std::uint64_t generation) const { return !pending.contains(generation); }
};

namespace {

struct Operation {
  Action action;
  CUevent_st* event = nullptr;   // to wait for
  std::uint64_t generation = 0;  // of it
  void (*host)(void*) = nullptr;
  void* argument = nullptr;
};

}  // namespace

struct CUstream_st {
  int device = 0;
  std::deque<Operation> queue;
  bool busy = false;  // with a function of the host
  int priority = 0;   // it changes no order here
  Capture* capture = nullptr;
};

struct SimulatedGraph {
  std::vector<Action> operations;
};

namespace {

// All of it under one lock; whoever waits runs operations meanwhile.
struct Machine {
  std::mutex mutex;
  std::condition_variable changed;
  std::mt19937_64 random{number_from("SIMULATED_CUDA_SEED", 1)};
  std::vector<std::unique_ptr<CUstream_st>> defaults;  // of each device
  std::vector<cudaStream_t> streams;
  std::vector<std::unique_ptr<CUevent_st>> destroyed;
  std::map<const std::byte*, std::pair<std::size_t, int>> memory;  // device; -1: pinned
  std::map<std::uint64_t, std::unique_ptr<Capture>> captures;
  std::uint64_t next_capture = 1, allocations = 0, operations = 0, waits = 0;
  std::vector<void*> freed;
  std::set<int> in_use;  // devices
  bool hangs = false;

  int devices() const { return static_cast<int>(number_from("SIMULATED_CUDA_DEVICES", 1)); }
};

Machine& machine() {
  static auto* const one = new Machine;  // for good: threads may end after it would
  return *one;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::uint64_t launches = 0;

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

// The default stream of this thread, for as long as the program runs.
cudaStream_t per_thread_stream() {
  thread_local std::map<int, cudaStream_t> streams;
  cudaStream_t& mine = streams[current_device];
  if (mine == nullptr) {
    mine = new CUstream_st;
    mine->device = current_device;
    machine().streams.push_back(mine);
  }
  return mine;
}

// Handles 1 and 2 are cudaStreamLegacy and cudaStreamPerThread.
cudaStream_t stream_of(cudaStream_t stream) {
  const auto handle = reinterpret_cast<std::uintptr_t>(stream);
  if (handle == 2) return per_thread_stream();
  if (handle > 2) return stream;
  Machine& m = machine();
  while (m.defaults.size() <= static_cast<std::size_t>(current_device)) {
    m.defaults.push_back(std::make_unique<CUstream_st>());
    m.defaults.back()->device = static_cast<int>(m.defaults.size()) - 1;
    m.streams.push_back(m.defaults.back().get());
  }
  return m.defaults[static_cast<std::size_t>(current_device)].get();
}

bool is_stream(cudaStream_t stream) {
  return std::ranges::find(machine().streams, stream) != machine().streams.end();
}

bool can_run(const CUstream_st& stream) {
  if (stream.busy || stream.queue.empty()) return false;
  const Operation& next = stream.queue.front();
  return next.event == nullptr || next.event->is_over(next.generation);
}

// Runs one operation of some stream. Whether there was one.
bool run_one(std::unique_lock<std::mutex>&) {
  Machine& m = machine();
  if (m.hangs) return false;
  std::vector<cudaStream_t> able;
  for (cudaStream_t each : m.streams)
    if (can_run(*each)) able.push_back(each);
  if (able.empty()) return false;
  cudaStream_t stream = able[m.random() % able.size()];
  Operation next = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (next.host != nullptr) {
    stream->busy = true;
    std::thread([stream, next] {
      next.host(next.argument);
      const std::lock_guard lock(machine().mutex);
      stream->busy = false;
      machine().changed.notify_all();
    }).detach();
  } else if (next.action) {
    next.action();
  }
  m.changed.notify_all();
  return true;
}

// Until done() holds. Where nothing can run, another thread has to bring it about.
template <typename Done>
void run_until(std::unique_lock<std::mutex>& lock, Done done) {
  while (!done())
    if (!run_one(lock)) machine().changed.wait_for(lock, std::chrono::milliseconds(50));
}

bool idle(const CUstream_st& stream) { return !stream.busy && stream.queue.empty(); }

cudaError_t enqueue(cudaStream_t given, Operation operation) {
  Machine& m = machine();
  cudaStream_t stream = stream_of(given);
  ++m.operations;
  if (stream->capture == nullptr) {
    stream->queue.push_back(std::move(operation));
    m.changed.notify_all();
  } else if (operation.host != nullptr) {
    stream->capture->operations.push_back([operation] { operation.host(operation.argument); });
  } else if (operation.action) {
    stream->capture->operations.push_back(std::move(operation.action));
  }
  return cudaSuccess;
}

bool captures_anywhere() { return !machine().captures.empty(); }

cudaError_t allocate(void** address, std::size_t bytes, int device) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (captures_anywhere()) return fail(cudaErrorStreamCaptureUnsupported);
  ++m.allocations;
  if (device >= 0) m.in_use.insert(device);
  auto* data = static_cast<std::byte*>(std::malloc(bytes == 0 ? 1 : bytes));
  if (data == nullptr) return fail(cudaErrorMemoryAllocation);
  std::memset(data, 0xCD, bytes);
  m.memory[data] = {bytes == 0 ? 1 : bytes, device};
  *address = data;
  return cudaSuccess;
}

// CUDA promises no wait for what still uses memory that is freed: here that finds other bytes.
void empty_freed() {
  Machine& m = machine();
  if (!std::ranges::all_of(m.streams, [](cudaStream_t each) { return idle(*each); })) return;
  for (void* each : m.freed) std::free(each);
  m.freed.clear();
}

cudaError_t release(void* address) {
  if (address == nullptr) return cudaSuccess;
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (captures_anywhere()) return fail(cudaErrorStreamCaptureUnsupported);
  const auto found = m.memory.find(static_cast<std::byte*>(address));
  if (found == m.memory.end()) return fail(cudaErrorInvalidValue);
  std::memset(address, 0xDD, found->second.first);
  m.memory.erase(found);
  m.freed.push_back(address);
  empty_freed();
  return cudaSuccess;
}

}  // namespace

namespace simulated {

std::mt19937_64& random_bits() { return machine().random; }

int launch(cudaStream_t stream, unsigned blocks, unsigned threads, std::function<void()> thread) {
  ++launches;
  const std::lock_guard lock(machine().mutex);
  return enqueue(stream, {[=, thread = std::move(thread)] { run_grid(blocks, threads, thread); }});
}

}  // namespace simulated

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    default:
      return "a simulated error";
  }
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 0;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = machine().devices();
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= machine().devices()) return fail(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "simulated device %d", device);
  properties->uuid.bytes[0] = static_cast<char>(device);
  properties->totalGlobalMem = std::size_t{1} << 30;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* to, int bytes, int device) {
  std::snprintf(to, static_cast<std::size_t>(bytes), "0000:00:%02x.0",
                static_cast<unsigned>(device));
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= machine().devices()) return fail(cudaErrorInvalidDevice);
  const std::lock_guard lock(machine().mutex);
  machine().in_use.insert(device);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  int (*const is_active)(int, unsigned*, int*) = [](int device, unsigned*, int* active) {
    const std::lock_guard lock(machine().mutex);
    *active = machine().in_use.contains(device) ? 1 : 0;
    return 0;
  };
  *function = reinterpret_cast<void*>(is_active);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  *found = {cudaMemoryTypeUnregistered, -2};
  const auto* at = static_cast<const std::byte*>(address);
  auto next = m.memory.upper_bound(at);
  if (next == m.memory.begin()) return cudaSuccess;
  const auto& [begin, of] = *std::prev(next);
  if (at >= begin + of.first) return cudaSuccess;
  *found = {of.second < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice,
            of.second < 0 ? current_device : of.second};
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  return allocate(address, bytes, current_device);
}
cudaError_t cudaFree(void* address) { return release(address); }
cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned) {
  return allocate(address, bytes, -1);
}
cudaError_t cudaFreeHost(void* address) { return release(address); }

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  *stream = new CUstream_st;
  (*stream)->device = current_device;
  (*stream)->priority = priority;
  m.streams.push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  Machine& m = machine();
  std::unique_lock lock(m.mutex);
  run_until(lock, [&] { return idle(*stream); });
  std::erase(m.streams, stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t given) {
  Machine& m = machine();
  std::unique_lock lock(m.mutex);
  cudaStream_t stream = stream_of(given);
  if (stream->capture != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  ++m.waits;
  run_until(lock, [&] { return idle(*stream); });
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  Machine& m = machine();
  std::unique_lock lock(m.mutex);
  if (captures_anywhere()) return fail(cudaErrorStreamCaptureUnsupported);
  ++m.waits;
  run_until(lock, [&m] {
    return std::ranges::all_of(
        m.streams, [](cudaStream_t each) { return each->device != current_device || idle(*each); });
  });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t given, cudaEvent_t event, unsigned) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  cudaStream_t stream = stream_of(given);
  if (event->capture != nullptr) {
    if (stream->capture == nullptr && stream->queue.empty()) stream->capture = event->capture;
    return stream->capture == event->capture ? cudaSuccess : fail(cudaErrorStreamCaptureIsolation);
  }
  if (event->recorded == 0) return cudaSuccess;
  if (stream->capture != nullptr) return fail(cudaErrorStreamCaptureIsolation);
  return enqueue(stream, {{}, event, event->recorded});
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t given, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
  const std::lock_guard lock(machine().mutex);
  const Capture* capture = stream_of(given)->capture;
  *status = capture == nullptr ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  if (capture != nullptr) *id = capture->id;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  (*event)->device = current_device;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(machine().mutex);
  machine().destroyed.emplace_back(event);  // streams may still refer to it, and nobody waits
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t given) {
  const std::lock_guard lock(machine().mutex);
  cudaStream_t stream = stream_of(given);
  if (!is_stream(stream)) return fail(cudaErrorInvalidResourceHandle);  // it was destroyed
  if (event->device != stream->device) return fail(cudaErrorInvalidResourceHandle);
  event->capture = stream->capture;
  if (stream->capture != nullptr) return cudaSuccess;
  const std::uint64_t generation = ++event->recorded;
  event->pending.insert(generation);
  return enqueue(stream, {[event, generation] { event->pending.erase(generation); }});
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Machine& m = machine();
  std::unique_lock lock(m.mutex);
  if (event->capture != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  for (int i = 0; i < kAtOnce && !event->is_over(event->recorded); ++i) run_one(lock);
  return event->is_over(event->recorded) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const std::lock_guard lock(machine().mutex);
  return enqueue(stream, {[=] { std::memmove(to, from, bytes); }});
}
cudaError_t cudaMemsetAsync(void* to, int byte, std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const std::lock_guard lock(machine().mutex);
  return enqueue(stream, {[=] { std::memset(to, byte, bytes); }});
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  const std::lock_guard lock(machine().mutex);
  return enqueue(stream, {{}, nullptr, 0, function, argument});
}

int simulated_cuda_begin_capture(cudaStream_t given) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  cudaStream_t stream = stream_of(given);
  auto capture = std::make_unique<Capture>();
  capture->id = m.next_capture++;
  capture->origin = stream;
  stream->capture = capture.get();
  m.captures[capture->id] = std::move(capture);
  return 0;
}
SimulatedGraph* simulated_cuda_end_capture(cudaStream_t given) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  Capture* capture = stream_of(given)->capture;
  if (capture == nullptr || capture->origin != stream_of(given)) return nullptr;
  for (cudaStream_t each : m.streams)
    if (each->capture == capture) each->capture = nullptr;
  auto* graph = new SimulatedGraph{std::move(capture->operations)};
  m.captures.erase(capture->id);
  return graph;
}
int simulated_cuda_launch_graph(SimulatedGraph* graph, cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  return enqueue(stream, {[graph] {
                   for (const Action& each : graph->operations) each();
                 }});
}
void simulated_cuda_free_graph(SimulatedGraph* graph) { delete graph; }
void simulated_cuda_seed(std::uint64_t seed) {
  const std::lock_guard lock(machine().mutex);
  machine().random.seed(seed);
}
std::uint64_t simulated_cuda_allocations() {
  const std::lock_guard lock(machine().mutex);
  return machine().allocations;
}
std::uint64_t simulated_cuda_operations() {
  const std::lock_guard lock(machine().mutex);
  return machine().operations;
}
int simulated_cuda_priority(cudaStream_t stream) { return stream->priority; }
std::uint64_t simulated_cuda_launches() { return launches; }
std::uint64_t simulated_cuda_waits() {
  const std::lock_guard lock(machine().mutex);
  return machine().waits;
}
void simulated_cuda_hang(int on) {
  const std::lock_guard lock(machine().mutex);
  machine().hangs = on != 0;
  machine().changed.notify_all();
}
void* simulated_cuda_allocate(std::size_t bytes) {
  void* address = nullptr;
  cudaMalloc(&address, bytes);
  return address;
}
void simulated_cuda_release(void* address) {
  cudaDeviceSynchronize();
  cudaFree(address);
}
void simulated_cuda_copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
  cudaStreamSynchronize(stream);
}
void simulated_cuda_enqueue_copy(void* to, const void* from, std::size_t bytes,
                                 cudaStream_t stream) {
  cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
void simulated_cuda_put(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  const auto* begin = static_cast<const std::byte*>(from);
  const std::lock_guard lock(machine().mutex);
  enqueue(stream, {[to, values = std::vector<std::byte>(begin, begin + bytes)] {
            std::memcpy(to, values.data(), values.size());
          }});
}
