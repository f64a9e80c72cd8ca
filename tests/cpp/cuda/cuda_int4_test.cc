// int4 on a GPU is the CPU's, bit for bit.
#include <gtest/gtest.h>

#include <array>

#include "cuda_kernels.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::cuda {
namespace {

// Of one run each.
Status int4_encode(const float* x, const SpanFeedback& span_feedback, std::size_t n,
                   std::size_t block, const Int8Rounding& rounding, std::byte* out) {
  const GpuSpan run{.x = x,
                    .n = n,
                    .span_feedback = span_feedback,
                    .call = rounding.call,
                    .element = rounding.element};
  return api().int4_encode_spans(block, rounding, &run, 1, {.out = out}, nullptr, stream());
}
Status int4_decode(const std::byte* in, std::size_t n, std::size_t block, bool stochastic, float* y,
                   bool add, std::uint32_t* flags) {
  const GpuSpan run{.y = y, .n = n};
  return api().int4_decode_spans(block, stochastic, &run, 1, {.payloads = {in, 0, 1}, .adds = add},
                                 flags, stream());
}

struct Case {
  const char* name;
  std::size_t block;
  bool stochastic;
};
constexpr Case kCases[] = {{"int4", 32, false},
                           {"int4:rounding=stochastic,seed=7", 32, true},
                           {"int4:block=64,rounding=stochastic,seed=7", 64, true},
                           {"int4:block=128", 128, false}};

class CudaInt4 : public testing::TestWithParam<Case> {
 protected:
  std::vector<std::size_t> lengths() const {
    constexpr std::size_t kUnit = codec::Int4Kernels::kUnit;
    // The last: more than are launched at once.
    return {0, 1, 15, 16, 33, 130, kUnit - 1, kUnit, 2 * kUnit + 55, 26 * kUnit};
  }
  std::size_t shift() { return random_() % 2; }

  // Few are enough of long ones.
  bool skips(std::size_t n) { return n > 5000 && random_() % 16 > 0; }

  std::shared_ptr<const codec::Codec> codec_ = codec::make_codec(GetParam().name);
  codec::FloatEnvironment environment_;
  std::mt19937_64 random_{7};
};

TEST_P(CudaInt4, EncodesAsTheCpu) {
  const auto [name, block, stochastic] = GetParam();
  for (const Family& family : kFamilies)
    for (const std::size_t n : lengths())
      for (const bool fed_back : {false, true}) {
        if (skips(n)) continue;
        const auto x = draw(family, n, random_), e = draw(kFamilies[n % 5], n, random_);
        constexpr std::uint64_t kCall = 77, kCalls = 5;
        const std::uint64_t element = 3 * codec::Int4Kernels::kUnit, seed = stochastic ? 7 : 0;
        std::vector<std::byte> expected(codec_->max_bytes(n));
        std::vector<float> error(n);
        codec_->encode(x.data(), n,
                       {.call = fed_back ? kCall ^ kCalls : kCall,
                        .element = element,
                        .residual = fed_back ? e.data() : nullptr,
                        .error = fed_back ? error.data() : nullptr},
                       expected);
        const DeviceArray<float> in(x, shift());
        const DeviceArray<std::byte> out(draw_bytes(expected.size(), random_), 0);
        const DeviceFeedback feedback(e, shift(), static_cast<std::uint32_t>(n % 2), kCalls);
        RUN(int4_encode(in.data(), fed_back ? feedback.span_feedback() : SpanFeedback{}, n, block,
                        {stochastic, seed, kCall, element}, out.data()));
        ASSERT_TRUE(same(out.values(), expected)) << family.name << " n=" << n;
        ASSERT_TRUE(same(in.values(), x));
        if (!fed_back) continue;
        ASSERT_TRUE(same(feedback.after(), error)) << family.name << " n=" << n;
        ASSERT_TRUE(same(feedback.before(), e));
      }
}

void expect_decoded(const codec::Codec& codec, const Case& of,
                    const std::vector<std::byte>& payload, const std::vector<float>& before,
                    std::size_t shift) {
  const std::size_t n = before.size();
  const DeviceArray<std::byte> in(payload, 0);
  for (const bool add : {false, true}) {
    auto expected = before;
    const bool finite = (add ? codec.decode_add(payload, expected.data(), n)
                             : codec.decode(payload, expected.data(), n))
                            .finite;
    const DeviceArray<float> y(before, shift);
    const DeviceArray<std::uint32_t> flags({kRefused});
    RUN(int4_decode(in.data(), n, of.block, of.stochastic, y.data(), add, flags.data()));
    ASSERT_TRUE(same(y.values(), expected)) << "n=" << n << " add=" << add;
    ASSERT_EQ(flags.value(), finite ? kRefused : kRefused | kNotFinite) << "n=" << n;
    RUN(int4_decode(in.data(), n, of.block, of.stochastic, y.data(), add, nullptr));
  }
}

TEST_P(CudaInt4, DecodesAsTheCpu) {
  for (const Family& family : kFamilies)
    for (const std::size_t n : lengths()) {
      if (skips(n)) continue;
      const auto x = draw(family, n, random_), before = draw(kFamilies[n % 17], n, random_);
      std::vector<std::byte> payload(codec_->max_bytes(n));
      codec_->encode(x.data(), n, {}, payload);
      expect_decoded(*codec_, GetParam(), payload, before, shift());
    }
}

// Scales that nobody writes among them, and sums that are not finite.
TEST_P(CudaInt4, DecodesForeignBytesAsTheCpu) {
  for (const std::size_t n : lengths())
    for (int trial = 0; trial < 4; ++trial) {
      auto payload = draw_bytes(codec_->max_bytes(n), random_);
      const auto first = std::array{0x7F7F, 0x7F80, 0xFF7F, 0x7FC1}[trial];  // the first scale
      if (n > 0) std::memcpy(payload.data(), &first, 2);
      if (skips(n)) continue;
      expect_decoded(*codec_, GetParam(), payload, draw(kFamilies[6], n, random_), shift());
    }
}

// What lies in place of elements behind the end of a payload has no part in what is sent on.
TEST_P(CudaInt4, AddsAndEncodesAsTheCpu) {
  for (const std::size_t n : lengths()) {
    if (skips(n)) continue;
    const auto x = draw(kFamilies[0], n, random_);
    auto first = draw_bytes(codec_->max_bytes(n), random_);
    std::vector<float> sum = x;
    codec_->decode_add(first, sum.data(), n);
    std::vector<std::byte> expected(codec_->max_bytes(n));
    const std::uint64_t seed = GetParam().stochastic ? 7 : 0;
    codec_->encode(sum.data(), n, {.call = 77}, expected);
    const DeviceArray<float> y(x, shift());
    const DeviceArray<std::byte> in(first, 0), out(draw_bytes(expected.size(), random_), 0);
    const GpuSpan run{.x = y.data(), .y = y.data(), .n = n, .call = 77};
    const Encoding how{.received = {in.data(), 0, 1}, .out = out.data(), .finishes = true};
    RUN(api().int4_encode_spans(GetParam().block, {GetParam().stochastic, seed, 0, 0}, &run, 1, how,
                                nullptr, stream()));
    ASSERT_TRUE(same(out.values(), expected)) << "n=" << n;
    codec_->decode(expected, sum.data(), n);
    ASSERT_TRUE(same(y.values(), sum)) << "n=" << n;
  }
}

INSTANTIATE_TEST_SUITE_P(Blocks, CudaInt4, testing::ValuesIn(kCases), [](const auto& each) {
  return "of" + std::to_string(each.param.block) + (each.param.stochastic ? "AtRandom" : "");
});

TEST(CudaInt4, NothingIsEmpty) {
  RUN(int4_encode(nullptr, {}, 0, 32, {}, nullptr));
  RUN(int4_decode(nullptr, 0, 32, false, nullptr, true, nullptr));
}

}  // namespace
}  // namespace gradwire::cuda
