// Gathered payloads are foreign: each length of them is checked. The test plays rank 1.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "exec_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/exec/program/cpu_device.h"

namespace gradwire::exec {
namespace exec_gather_test {

// What a rank sends, when it is spoilt: the length that it announces, and its block, which begins
// with the lengths of its parts.
struct Spoil {
  std::function<void(std::uint64_t&)> length = [](auto&) {};
  std::function<void(std::byte*)> block = [](auto*) {};
};

// Two arrays, to which rank 1 adds the same, but for what is spoilt.
std::vector<float> sum(const Spoil& spoil) {
  const codec::FloatEnvironment environment;
  std::vector<float> x = {1, 2, 3}, y = {4, 5};
  const Array arrays[] = {array_of(x), array_of(y)};
  Request call;
  call.codec = codec::make_codec("threshold:tau=1");  // of varying length: there is room for more
  call.algorithm = "gather";
  call.inputs = call.outputs = arrays;
  call.size = 2;
  CpuDevice gather;
  gather.bind(call, decide(call, /*feeds_back=*/false));

  const Request* lengths = gather.next({});
  std::uint64_t length = 0;
  std::memcpy(&length, lengths->outputs[0].data, sizeof length);
  spoil.length(length);
  std::memcpy(lengths->outputs[1].data, &length, sizeof length);

  const Request* bytes = gather.next({});
  std::byte* block = bytes->outputs[1].data;
  std::memcpy(block, bytes->outputs[0].data, bytes->outputs[0].count);
  spoil.block(block);
  EXPECT_EQ(gather.next({}), nullptr);
  x.insert(x.end(), y.begin(), y.end());
  return x;
}

void expect_refused(const Spoil& spoil, const std::string& why) {
  try {
    sum(spoil);
    FAIL() << "accepted: " << why;
  } catch (const TransportError& error) {
    EXPECT_EQ(error.peer(), 1);
    EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
  }
}

TEST(Gather, AddsWhatIsAsItShouldBe) { EXPECT_EQ(sum({}), std::vector<float>({2, 2, 2, 2, 2})); }

TEST(Gather, RefusesLengthsThatDoNotAddUp) {
  expect_refused({.length = [](auto& length) { ++length; }}, "longer than its parts");
  expect_refused({.length = [](auto& length) { --length; }}, "shorter than its parts");
  expect_refused({.length = [](auto& length) { length = 3; }}, "shorter than its parts");
  expect_refused({.length = [](auto& length) { length = 1 << 20; }}, "at most");
  const auto endless = [](std::byte* block) { std::fill_n(block + 4, 4, std::byte{0xFF}); };
  expect_refused({.block = endless}, "shorter than its parts");
}

// The caller's text may be gone when the phases run.
TEST(Gather, KeepsTheNameOfItsAlgorithm) {
  std::string algorithm = "gather(ring)";
  std::vector<float> x = {1, 2, 3};
  const Array array = array_of(x);
  Request call;
  call.size = 2;
  call.codec = codec::make_codec("fp16");
  call.algorithm = algorithm;
  call.inputs = call.outputs = {&array, 1};
  CpuDevice gather;
  gather.bind(call, decide(call, /*feeds_back=*/false));
  algorithm.assign(algorithm.size(), 'x');
  EXPECT_EQ(gather.next({})->algorithm, "ring");
}

}  // namespace exec_gather_test
}  // namespace gradwire::exec
