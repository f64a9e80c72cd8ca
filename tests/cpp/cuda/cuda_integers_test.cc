// int8 and int4 on a GPU are the CPU's, bit for bit.
#include <gtest/gtest.h>

#include <array>

#include "cuda_kernels.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::cuda {
namespace {

struct Case {
  const char* name;
  std::size_t block;
  bool stochastic = false;
  std::uint64_t seed = 0;

  bool is_int4() const { return name[3] == '4'; }
  // Elements after which a payload of its own may begin.
  std::size_t unit() const { return is_int4() ? codec::Int4Kernels::kUnit : block; }

  Status encode(const GpuSpan& span, const Encoding& how, std::uint64_t call = 0) const {
    const auto encode_spans = is_int4() ? api().int4_encode_spans : api().int8_encode_spans;
    return encode_spans(block, {stochastic, seed, call, span.element}, &span, 1, how, nullptr,
                        stream());
  }
  Status decode(const std::byte* in, std::size_t n, float* y, bool add,
                std::uint32_t* flags) const {
    const GpuSpan span{.y = y, .n = n};
    const Decoding how{.payloads = {in, 0, 1}, .adds = add};
    if (is_int4())
      return api().int4_decode_spans(block, stochastic, &span, 1, how, flags, stream());
    return api().int8_decode_spans(block, &span, 1, how, flags, stream());
  }
};
// Of int8: blocks of one warp, of several, and those that even the most warps read twice.
constexpr Case kCases[] = {{"int8", 1024},
                           {"int8:block=32", 32},
                           {"int8:block=992,rounding=stochastic,seed=7", 992, true, 7},
                           {"int8:block=1056", 1056},
                           {"int8:block=8192,rounding=stochastic", 8192, true},
                           {"int8:block=20000", 20000},
                           {"int8:block=65536", 65536},
                           {"int4", 32},
                           {"int4:rounding=stochastic,seed=7", 32, true, 7},
                           {"int4:block=64,rounding=stochastic,seed=7", 64, true, 7},
                           {"int4:block=128", 128}};

class CudaIntegers : public testing::TestWithParam<Case> {
 protected:
  // The last of each list: more than are launched at once.
  std::vector<std::size_t> lengths() const {
    const std::size_t block = of_.block, unit = of_.unit();
    if (of_.is_int4()) return {0, 1, 15, 16, 33, 130, unit - 1, unit, 2 * unit + 55, 26 * unit};
    if (block > 10000) return {1, 1025, 8193, block + 33};
    if (block == 32) return {0, 1, 31, 33, 287, 9001};
    return {0, 1, 2, 63, block - 1, block, block + 1, 3 * block + 7, 9 * block};
  }
  std::size_t shift() { return random_() % 2; }

  // Few are enough of long ones.
  bool skips(std::size_t n) { return n > 5000 && random_() % (of_.is_int4() ? 16 : 4) > 0; }

  void expect_decoded(const std::vector<std::byte>& payload, const std::vector<float>& before);

  const Case of_ = GetParam();
  std::shared_ptr<const codec::Codec> codec_ = codec::make_codec(of_.name);
  codec::FloatEnvironment environment_;
  std::mt19937_64 random_{7};
};

TEST_P(CudaIntegers, EncodeAsTheCpu) {
  for (const Family& family : kFamilies)
    for (const std::size_t n : lengths())
      for (const bool fed_back : {false, true}) {
        if (skips(n)) continue;
        const auto x = draw(family, n, random_), e = draw(kFamilies[n % 5], n, random_);
        constexpr std::uint64_t kCall = 77, kCalls = 5;
        const std::uint64_t element = 3 * of_.unit();
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
        const GpuSpan span{.x = in.data(),
                           .n = n,
                           .span_feedback = fed_back ? feedback.span_feedback() : SpanFeedback{},
                           .call = kCall,
                           .element = element};
        RUN(of_.encode(span, {.out = out.data()}, kCall));
        ASSERT_TRUE(same(out.values(), expected)) << family.name << " n=" << n;
        ASSERT_TRUE(same(in.values(), x));
        if (!fed_back) continue;
        ASSERT_TRUE(same(feedback.after(), error)) << family.name << " n=" << n;
        ASSERT_TRUE(same(feedback.before(), e));
      }
}

void CudaIntegers::expect_decoded(const std::vector<std::byte>& payload,
                                  const std::vector<float>& before) {
  const std::size_t n = before.size(), at = shift();
  const DeviceArray<std::byte> in(payload, 0);
  for (const bool add : {false, true}) {
    auto expected = before;
    const bool finite = (add ? codec_->decode_add(payload, expected.data(), n)
                             : codec_->decode(payload, expected.data(), n))
                            .finite;
    const DeviceArray<float> y(before, at);
    const DeviceArray<std::uint32_t> flags({kRefused});
    RUN(of_.decode(in.data(), n, y.data(), add, flags.data()));
    ASSERT_TRUE(same(y.values(), expected)) << "n=" << n << " add=" << add;
    ASSERT_EQ(flags.value(), finite ? kRefused : kRefused | kNotFinite) << "n=" << n;
    RUN(of_.decode(in.data(), n, y.data(), add, nullptr));
  }
}

TEST_P(CudaIntegers, DecodeAsTheCpu) {
  for (const Family& family : kFamilies)
    for (const std::size_t n : lengths()) {
      if (skips(n)) continue;
      const auto x = draw(family, n, random_), before = draw(kFamilies[n % 17], n, random_);
      std::vector<std::byte> payload(codec_->max_bytes(n));
      codec_->encode(x.data(), n, {}, payload);
      expect_decoded(payload, before);
    }
}

// Scales that nobody writes among them, and sums that are not finite.
TEST_P(CudaIntegers, DecodeForeignBytesAsTheCpu) {
  const float scales[] = {codec::Int8Kernels::kMostScale, kMost};
  const std::uint16_t short_scales[] = {0x7F7F, 0x7F80, 0xFF7F, 0x7FC1};
  for (const std::size_t n : lengths())
    for (std::size_t trial = 0; trial < 4; ++trial) {
      auto payload = draw_bytes(codec_->max_bytes(n), random_);
      if (n > 0 && of_.is_int4()) std::memcpy(payload.data(), &short_scales[trial], 2);
      if (n > 0 && !of_.is_int4() && trial < 2) std::memcpy(payload.data(), &scales[trial], 4);
      if (skips(n)) continue;
      expect_decoded(payload, draw(kFamilies[6], n, random_));
    }
}

// What lies in place of elements behind the end of a payload has no part in what is sent on.
TEST_P(CudaIntegers, AddAndEncodeAsTheCpu) {
  for (const std::size_t n : lengths()) {
    if (skips(n)) continue;
    const auto x = draw(kFamilies[0], n, random_);
    auto first = draw_bytes(codec_->max_bytes(n), random_);
    std::vector<float> sum = x;
    codec_->decode_add(first, sum.data(), n);
    std::vector<std::byte> expected(codec_->max_bytes(n));
    codec_->encode(sum.data(), n, {.call = 77}, expected);
    const DeviceArray<float> y(x, shift());
    const DeviceArray<std::byte> in(first, 0), out(draw_bytes(expected.size(), random_), 0);
    const GpuSpan span{.x = y.data(), .y = y.data(), .n = n, .call = 77};
    RUN(of_.encode(span, {.received = {in.data(), 0, 1}, .out = out.data(), .finishes = true}));
    ASSERT_TRUE(same(out.values(), expected)) << "n=" << n;
    codec_->decode(expected, sum.data(), n);
    ASSERT_TRUE(same(y.values(), sum)) << "n=" << n;
  }
}

INSTANTIATE_TEST_SUITE_P(Blocks, CudaIntegers, testing::ValuesIn(kCases), [](const auto& each) {
  const Case& of = each.param;
  return std::string(of.name, 4) + "Of" + std::to_string(of.block) +
         (of.stochastic ? "AtRandom" : "");
});

TEST_P(CudaIntegers, NothingIsEmpty) {
  RUN(of_.encode({}, {}));
  RUN(of_.decode(nullptr, 0, nullptr, true, nullptr));
}

}  // namespace
}  // namespace gradwire::cuda
