// A repeated call allocates nothing. This program counts every operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>

#include "exec_ranks.h"
#include "gradwire/exec/trace/recorder.h"

namespace {
std::atomic<std::uint64_t> allocations{0};
}

// Not inlined: GCC would compare malloc with the delete it sees, and warn.
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size);
}
[[gnu::noinline]] void* operator new(std::size_t size) {
  if (void* memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace gradwire::exec {
namespace exec_allocation_test {

// Other values for each rank and call, as gradients are.
void fill(std::vector<float>& x, int rank, int call) {
  std::uint32_t state = static_cast<std::uint32_t>(1000 * rank + call);
  for (float& each : x) {
    state = state * 1664525 + 1013904223;
    const float unit = static_cast<float>(state >> 8) * 0x1p-23F - 1;
    each = unit * unit * unit;
  }
}

void expect_no_allocation(std::string_view algorithm, std::string_view codec_name, std::size_t n,
                          bool feeds_back = false, DType dtype = DType::kFloat32,
                          bool records = false) {
  Ranks ranks(3, "shm");
  for (int r = 0; records && r < 3; ++r) ranks[r].observe(std::make_shared<Recorder>(256));
  const auto codec = codec::make_codec(codec_name);
  std::uint64_t counted = 0;
  std::atomic<int> ready{0};
  ranks.run([&](Communicator& comm) {
    std::vector<float> x(n, 1);
    const std::vector<codec::KeyedArray> keys = {{"a key that is longer than a word", n}};
    const Array arrays[] = {array_of(x)};
    const std::size_t rows = n % 100 == 0 ? 100 : 1;
    const Shape shapes[] = {{rows, n / rows}};
    Request call;
    call.algorithm = algorithm;
    call.codec = codec;
    call.dtype = dtype;
    call.inputs = call.outputs = arrays;
    call.shapes = shapes;
    if (feeds_back) {
      call.feedback = std::make_shared<codec::ErrorFeedback>();
      call.keys = keys;
    }
    int calls = 0;
    const auto run = [&](int times) {
      for (const int end = calls + times; calls < end; ++calls) {
        fill(x, comm.identity().rank, calls);
        comm.run(call);
      }
    };
    run(30);
    ++ready;
    while (ready < 3) std::this_thread::yield();
    const std::uint64_t before = allocations;
    run(100);
    if (comm.identity().rank == 0) counted = allocations - before;
    ++ready;
    while (ready < 6) std::this_thread::yield();
  });
  EXPECT_EQ(counted, 0U) << algorithm << " " << codec_name << " n=" << n;
}

TEST(Allocation, NorDoSumsThatAreFormedWide) {
  for (std::string_view algorithm : {"direct", "star", "gather", "binary_tree"})
    for (std::size_t n : {1, 30000})
      expect_no_allocation(algorithm, "none", n, /*feeds_back=*/false, DType::kBFloat16);
}

// A gathered payload of another size class than any before needs a plan; these soon keep theirs.
constexpr std::string_view kOfSteadySize[] = {"fp16", "bf16",      "int8",           "onebit",
                                              "topk", "threshold", "threshold:tau=2"};

TEST(Allocation, NorDoThoseOfAnyCodecWithFeedback) {
  for (std::string_view codec : codec::codec_names())
    expect_no_allocation(codec == "lowrank" ? "auto" : "direct", codec, 30000, /*feeds_back=*/true);
  for (std::string_view codec : kOfSteadySize)
    expect_no_allocation("gather", codec, 30000, /*feeds_back=*/true);
  for (std::string_view codec : {"topk", "threshold"})
    expect_no_allocation("auto", codec, 30000, /*feeds_back=*/true);
}

TEST(Allocation, RepeatedCallsMakeNone) {
  for (std::size_t n : {std::size_t{1}, std::size_t{100000}}) {
    expect_no_allocation("direct", "none", n);
    expect_no_allocation("ring", "none", n);
    expect_no_allocation("ring", "fp16", n);
    expect_no_allocation("auto", "none", n);
    expect_no_allocation("gather", "none", n);
  }
}

TEST(Allocation, NorDoCallsThatAreRecorded) {
  expect_no_allocation("ring", "none", 1000, false, DType::kFloat32, /*records=*/true);
  expect_no_allocation("ring", "onebit", 1000, true, DType::kFloat32, /*records=*/true);
  expect_no_allocation("auto", "lowrank", 30000, true, DType::kFloat32, /*records=*/true);
}

TEST(Allocation, IsCounted) {  // or the test above could not fail
  const std::uint64_t before = allocations;
  std::vector<int> some(10);
  EXPECT_GT(allocations.load(), before) << some.data();
}

}  // namespace exec_allocation_test
}  // namespace gradwire::exec
