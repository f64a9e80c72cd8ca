// The simulated device itself: what goes wrong on a real one must go wrong on it.
#include <gtest/gtest.h>

#include <vector>

#include "gradwire/cuda/device.h"
#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {
namespace {

const Api& api() { return load_api(GRADWIRE_SIMULATED_CUDA_SO); }

__global__ void reverse(int* values, bool waits) {
  __shared__ int kept[256];
  kept[threadIdx.x] = values[threadIdx.x];
  if (waits) __syncthreads();
  values[threadIdx.x] = kept[255 - threadIdx.x];
}

// Uses other values each time, since shared memory keeps what it held.
std::vector<int> reversed(bool waits, int first) {
  Room room(api());
  int* values = reinterpret_cast<int*>(room.take(256 * sizeof(int)));
  OwnedStream stream(api());
  std::vector<int> host(256), back(256);
  for (int i = 0; i < 256; ++i) host[static_cast<std::size_t>(i)] = first + i;
  api().copy(values, host.data(), 1024, CopyKind::kToDevice, stream.get());
  EXPECT_EQ(launch(reverse, 1, 256, stream.get(), values, waits), 0);
  api().copy(back.data(), values, 1024, CopyKind::kToHost, stream.get());
  EXPECT_EQ(back[0], 0) << "it ran before anybody waited";
  check(api(), api().synchronize(stream.get()), "synchronize");
  return back;
}

TEST(SimulatedCuda, BarriersOrderThreads) {
  const std::vector<int> back = reversed(true, 1000);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(back[static_cast<std::size_t>(i)], 1255 - i);
}

TEST(SimulatedCuda, AMissingBarrierShows) {
  const std::vector<int> back = reversed(false, 2000);
  int wrong = 0;
  for (int i = 0; i < 256; ++i) wrong += back[static_cast<std::size_t>(i)] != 2255 - i ? 1 : 0;
  EXPECT_GT(wrong, 0);
}

__global__ void ballots(unsigned* out) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned odd = __ballot_sync(kAllLanes, lane % 2);
  unsigned sum = lane;
  for (int w = 16; w > 0; w /= 2) sum += __shfl_xor_sync(kAllLanes, sum, w);
  const int count = __syncthreads_count(threadIdx.x < 10);
  out[threadIdx.x] =
      odd == 0xAAAAAAAAU && sum == 496 && count == 10 && __reduce_max_sync(kAllLanes, lane) == 31;
}

TEST(SimulatedCuda, WarpsExchange) {
  Room room(api());
  auto* out = reinterpret_cast<unsigned*>(room.take(128 * sizeof(unsigned)));
  OwnedStream stream(api());
  EXPECT_EQ(launch(ballots, 1, 128, stream.get(), out), 0);
  check(api(), api().synchronize(stream.get()), "synchronize");
  for (int i = 0; i < 128; ++i) EXPECT_EQ(out[i], 1U);
}

// Two streams that write one word: with an event in order, without it in any.
int last_of_two(bool ordered) {
  Room room(api());
  std::byte* word = room.take(4);
  OwnedStream a(api()), b(api());
  OwnedEvent event(api());
  for (int i = 0; i < 8; ++i) api().fill(word, 0, 4, a.get());
  api().fill(word, 1, 4, a.get());
  api().record(event.get(), a.get());
  if (ordered) api().wait(b.get(), event.get());
  api().fill(word, 2, 4, b.get());
  api().synchronize(a.get());
  api().synchronize(b.get());
  return static_cast<int>(word[0]);
}

TEST(SimulatedCuda, OnlyEventsOrderStreams) {
  int wrong = 0;
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(last_of_two(true), 2);
    wrong += last_of_two(false) != 2 ? 1 : 0;
  }
  EXPECT_GT(wrong, 0);
}

TEST(SimulatedCuda, AnEventMayEndBeforeWhatWaitsForIt) {
  Room room(api());
  std::byte* word = room.take(4);
  OwnedStream a(api()), b(api());
  for (int i = 1; i < 50; ++i) {
    OwnedEvent event(api());
    api().fill(word, i, 4, a.get());
    api().record(event.get(), a.get());
    api().wait(b.get(), event.get());
  }
  const OwnedEvent another(api());  // in its place, and never recorded
  api().synchronize(b.get());
  EXPECT_EQ(static_cast<int>(word[0]), 49);
}

TEST(SimulatedCuda, OneEventOrdersSeveralStreams) {
  Room room(api());
  std::byte* words = room.take(8);
  OwnedStream a(api()), b(api()), c(api());
  OwnedEvent event(api());
  for (int i = 1; i < 50; ++i) {
    for (int more = 0; more < i; ++more) api().fill(words, 0, 4, a.get());
    api().fill(words, i, 4, a.get());
    api().record(event.get(), a.get());
    api().wait(c.get(), event.get());
    api().fill(words + 4, i, 4, b.get());
    api().record(event.get(), b.get());
    api().wait(c.get(), event.get());
    api().synchronize(c.get());
    EXPECT_EQ(static_cast<int>(words[0]), i);
    EXPECT_EQ(static_cast<int>(words[4]), i);
  }
}

TEST(SimulatedCuda, GraphsReplay) {
  Room room(api());
  std::byte* bytes = room.take(8);
  OwnedStream stream(api()), other(api());
  OwnedEvent fork(api()), join(api());
  simulated_cuda_begin_capture(stream.get());
  void* more = nullptr;
  EXPECT_NE(api().allocate(&more, 4), 0) << "allocated in a capture";
  api().record(fork.get(), stream.get());
  EXPECT_EQ(api().wait(other.get(), fork.get()), 0);
  api().copy(bytes + 4, bytes, 4, CopyKind::kOnDevice, other.get());
  api().record(join.get(), other.get());
  EXPECT_EQ(api().wait(stream.get(), join.get()), 0);
  SimulatedGraph* graph = simulated_cuda_end_capture(stream.get());
  ASSERT_NE(graph, nullptr);
  for (int i = 1; i < 4; ++i) {
    api().fill(bytes, i, 4, stream.get());
    simulated_cuda_launch_graph(graph, stream.get());
    api().synchronize(stream.get());
    EXPECT_EQ(static_cast<int>(bytes[7]), i);
  }
  simulated_cuda_free_graph(graph);
}

TEST(SimulatedCuda, KnowsItsMemory) {
  Room room(api()), pinned(api(), Room::MemoryKind::kPinned);
  int device = 7;
  api().device_of(room.take(16) + 15, &device);
  EXPECT_EQ(device, 0);
  api().device_of(pinned.take(16), &device);
  EXPECT_EQ(device, -1);
  api().device_of(&device, &device);
  EXPECT_EQ(device, -1);
}

TEST(LoadApi, SaysWhatIsWrong) {
  EXPECT_THROW(load_api("/nowhere/libgradwire_cuda.so"), InvalidArgument);
}

// A device that a thread has by default, and its process does not use, stays unused. (In a process
// of its own, in which nobody has used one.)
TEST(OnDevice, BeginsToUseNoOther) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ::setenv("SIMULATED_CUDA_DEVICES", "2", 1);
        const Api& api = load_api(GRADWIRE_SIMULATED_CUDA_SO);
        {
          const OnDevice here(api, 1);
        }
        std::_Exit(api.is_in_use(0) == 0 && api.is_in_use(1) == 1 ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
  EXPECT_EXIT(
      {
        ::setenv("SIMULATED_CUDA_DEVICES", "2", 1);
        const Api& api = load_api(GRADWIRE_SIMULATED_CUDA_SO);
        api.set_device(0);
        {
          const OnDevice here(api, 1);
        }
        int device = -1;
        api.get_device(&device);
        std::_Exit(device);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace gradwire::cuda
