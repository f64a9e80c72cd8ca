// int8 on a GPU is the CPU's, bit for bit.
#include <gtest/gtest.h>

#include "cuda_kernels.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::cuda {
namespace {

// Of one run each.
Status int8_encode(const float* x, const SpanFeedback& span_feedback, std::size_t n,
                   std::size_t block, const Int8Rounding& rounding, std::byte* out) {
  const GpuSpan run{.x = x,
                    .n = n,
                    .span_feedback = span_feedback,
                    .call = rounding.call,
                    .element = rounding.element};
  return api().int8_encode_spans(block, rounding, &run, 1, {.out = out}, nullptr, stream());
}
Status int8_decode(const std::byte* in, std::size_t n, std::size_t block, float* y, bool add,
                   std::uint32_t* flags) {
  const GpuSpan run{.y = y, .n = n};
  return api().int8_decode_spans(block, &run, 1, {.payloads = {in, 0, 1}, .adds = add}, flags,
                                 stream());
}

struct Case {
  const char* name;
  std::size_t block;
  bool stochastic;
};
// Blocks of one warp, of several, and those that even the most warps read twice.
constexpr Case kCases[] = {{"int8", 1024, false},
                           {"int8:block=32", 32, false},
                           {"int8:block=992,rounding=stochastic,seed=7", 992, true},
                           {"int8:block=1056", 1056, false},
                           {"int8:block=8192,rounding=stochastic", 8192, true},
                           {"int8:block=20000", 20000, false},
                           {"int8:block=65536", 65536, false}};

class CudaInt8 : public testing::TestWithParam<Case> {
 protected:
  std::vector<std::size_t> lengths() const {
    const std::size_t block = GetParam().block;
    if (block > 10000) return {1, 1025, 8193, block + 33};
    if (block == 32) return {0, 1, 31, 33, 287, 9001};  // the last: more than are launched at once
    return {0, 1, 2, 63, block - 1, block, block + 1, 3 * block + 7, 9 * block};
  }
  std::size_t shift() { return random_() % 2; }

  // Few are enough of long ones.
  bool skips(std::size_t n) { return n > 5000 && random_() % 4 > 0; }

  std::shared_ptr<const codec::Codec> codec_ = codec::make_codec(GetParam().name);
  codec::FloatEnvironment environment_;
  std::mt19937_64 random_{7};
};

TEST_P(CudaInt8, EncodesAsTheCpu) {
  const auto [name, block, stochastic] = GetParam();
  for (const Family& family : kFamilies)
    for (const std::size_t n : lengths())
      for (const bool fed_back : {false, true}) {
        if (skips(n)) continue;
        const auto x = draw(family, n, random_), e = draw(kFamilies[n % 5], n, random_);
        constexpr std::uint64_t kCall = 77, kCalls = 5;
        const std::uint64_t element = 3 * block, seed = stochastic && block == 992 ? 7 : 0;
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
        RUN(int8_encode(in.data(), fed_back ? feedback.span_feedback() : SpanFeedback{}, n, block,
                        {stochastic, seed, kCall, element}, out.data()));
        ASSERT_TRUE(same(out.values(), expected)) << family.name << " n=" << n;
        ASSERT_TRUE(same(in.values(), x));
        if (!fed_back) continue;
        ASSERT_TRUE(same(feedback.after(), error)) << family.name << " n=" << n;
        ASSERT_TRUE(same(feedback.before(), e));
      }
}

void expect_decoded(const codec::Codec& codec, std::size_t block,
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
    RUN(int8_decode(in.data(), n, block, y.data(), add, flags.data()));
    ASSERT_TRUE(same(y.values(), expected)) << "n=" << n << " add=" << add;
    ASSERT_EQ(flags.value(), finite ? kRefused : kRefused | kNotFinite) << "n=" << n;
    RUN(int8_decode(in.data(), n, block, y.data(), add, nullptr));
  }
}

TEST_P(CudaInt8, DecodesAsTheCpu) {
  for (const Family& family : kFamilies)
    for (const std::size_t n : lengths()) {
      if (skips(n)) continue;
      const auto x = draw(family, n, random_), before = draw(kFamilies[n % 17], n, random_);
      std::vector<std::byte> payload(codec_->max_bytes(n));
      codec_->encode(x.data(), n, {}, payload);
      expect_decoded(*codec_, GetParam().block, payload, before, shift());
    }
}

// Scales that nobody writes among them, and sums that are not finite.
TEST_P(CudaInt8, DecodesForeignBytesAsTheCpu) {
  for (const std::size_t n : lengths())
    for (int trial = 0; trial < 4; ++trial) {
      auto payload = draw_bytes(codec_->max_bytes(n), random_);
      if (n > 0 && trial == 0) std::memcpy(payload.data(), &kMost, sizeof kMost);
      if (n > 0 && trial == 1)
        std::memcpy(payload.data(), &codec::Int8Kernels::kMostScale, sizeof kMost);
      if (skips(n)) continue;
      expect_decoded(*codec_, GetParam().block, payload, draw(kFamilies[6], n, random_), shift());
    }
}

INSTANTIATE_TEST_SUITE_P(Blocks, CudaInt8, testing::ValuesIn(kCases),
                         [](const auto& each) { return "of" + std::to_string(each.param.block); });

TEST(CudaInt8, NothingIsEmpty) {
  RUN(int8_encode(nullptr, {}, 0, 1024, {}, nullptr));
  RUN(int8_decode(nullptr, 0, 1024, nullptr, true, nullptr));
}

}  // namespace
}  // namespace gradwire::cuda
