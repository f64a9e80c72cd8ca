// fp16 and bf16 on a GPU are the CPU's, bit for bit.
#include <gtest/gtest.h>

#include "cuda_kernels.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::cuda {
namespace {

// Of one run each.
Status cast_encode(CastType cast, const float* x, const SpanFeedback& span_feedback, float scale,
                   std::byte* out, std::size_t n) {
  const GpuSpan run{.x = x, .n = n, .span_feedback = span_feedback};
  return api().cast_encode_spans(cast, scale, &run, 1, {.out = out}, nullptr, stream());
}
Status cast_decode(CastType cast, const std::byte* in, float scale, float* y, std::size_t n,
                   bool add, std::uint32_t* flags) {
  const GpuSpan run{.y = y, .n = n};
  return api().cast_decode_spans(cast, scale, &run, 1, {.payloads = {in, 0, 1}, .adds = add}, flags,
                                 stream());
}

struct Case {
  const char* name;
  CastType cast;
  float scale;
};
constexpr Case kCases[] = {{"fp16", CastType::kFp16, 1},
                           {"fp16:scale=1024", CastType::kFp16, 1024},
                           {"fp16:scale=7.888609052210118e-31", CastType::kFp16, 0x1p-100F},
                           {"bf16", CastType::kBf16, 1}};

constexpr std::size_t kLengths[] = {0, 1, 2, 7, 2047, 2048, 2049, 6151, 70001};

class CudaCast : public testing::TestWithParam<Case> {
 protected:
  std::vector<std::uint16_t> halves(std::size_t n) {
    std::vector<std::uint16_t> values(n);
    for (auto& each : values) each = static_cast<std::uint16_t>(random_());
    return values;
  }
  static Bytes bytes_of(std::vector<std::uint16_t>& halves) {
    return std::as_writable_bytes(std::span(halves));
  }

  std::shared_ptr<const codec::Codec> codec_ = codec::make_codec(GetParam().name);
  codec::FloatEnvironment environment_;
  std::mt19937_64 random_{7};
};

TEST_P(CudaCast, EncodesAsTheCpu) {
  const auto [name, cast, scale] = GetParam();
  for (const Family& family : kFamilies)
    for (const std::size_t n : kLengths)
      for (const bool fed_back : {false, true}) {
        if (n > 10000 && random_() % 8 > 0) continue;
        const auto x = draw(family, n, random_), e = draw(kFamilies[n % 5], n, random_);
        std::vector<std::uint16_t> expected(n);
        std::vector<float> error(n);
        codec_->encode(
            x.data(), n,
            {.residual = fed_back ? e.data() : nullptr, .error = fed_back ? error.data() : nullptr},
            bytes_of(expected));
        const std::size_t shift = random_() % 2, other = random_() % 2;
        const DeviceArray<float> in(x, shift);
        const DeviceArray<std::uint16_t> out(halves(n), 0);
        const DeviceFeedback feedback(e, other, static_cast<std::uint32_t>(n % 2));
        RUN(cast_encode(cast, in.data(), fed_back ? feedback.span_feedback() : SpanFeedback{},
                        scale, reinterpret_cast<std::byte*>(out.data()), n));
        ASSERT_TRUE(same(out.values(), expected)) << family.name << " n=" << n;
        ASSERT_TRUE(same(in.values(), x));
        if (!fed_back) continue;
        ASSERT_TRUE(same(feedback.after(), error)) << family.name << " n=" << n;
        ASSERT_TRUE(same(feedback.before(), e));
      }
}

TEST_P(CudaCast, DecodesAsTheCpu) {
  const auto [name, cast, scale] = GetParam();
  for (const std::size_t n : kLengths)
    for (const bool add : {false, true})
      for (const bool all_finite : {false, true}) {
        auto payload = halves(n);
        if (all_finite)
          for (auto& each : payload) each = static_cast<std::uint16_t>(each & 0x8FFFU);
        const auto before = draw(kFamilies[n % std::size(kFamilies)], n, random_);
        auto expected = before;
        const bool finite = (add ? codec_->decode_add(bytes_of(payload), expected.data(), n)
                                 : codec_->decode(bytes_of(payload), expected.data(), n))
                                .finite;
        const DeviceArray<std::uint16_t> in(payload, 0);
        const DeviceArray<float> y(before, random_() % 2);
        const DeviceArray<std::uint32_t> flags({kRefused});
        RUN(cast_decode(cast, reinterpret_cast<const std::byte*>(in.data()), scale, y.data(), n,
                        add, flags.data()));
        ASSERT_TRUE(same(y.values(), expected)) << "n=" << n << " add=" << add;
        ASSERT_EQ(flags.value(), finite ? kRefused : kRefused | kNotFinite) << "n=" << n;
        RUN(cast_decode(cast, reinterpret_cast<const std::byte*>(in.data()), scale, y.data(), n,
                        false, nullptr));
      }
}

// All there are, of which the random ones above are some.
TEST_P(CudaCast, DecodesEveryValueAsTheCpu) {
  const auto [name, cast, scale] = GetParam();
  std::vector<std::uint16_t> payload(65536);
  for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<std::uint16_t>(i);
  std::vector<float> expected(payload.size());
  codec_->decode(bytes_of(payload), expected.data(), expected.size());
  const DeviceArray<std::uint16_t> in(payload, 0);
  const DeviceArray<float> y(std::vector<float>(payload.size()), 0);
  RUN(cast_decode(cast, reinterpret_cast<const std::byte*>(in.data()), scale, y.data(),
                  payload.size(), false, nullptr));
  ASSERT_TRUE(same(y.values(), expected));
}

INSTANTIATE_TEST_SUITE_P(Casts, CudaCast, testing::ValuesIn(kCases),
                         [](const auto& each) { return "case" + std::to_string(each.index); });

TEST(CudaCast, NothingIsEmpty) {
  RUN(cast_encode(CastType::kFp16, nullptr, {}, 1, nullptr, 0));
  RUN(cast_decode(CastType::kFp16, nullptr, 1, nullptr, 0, true, nullptr));
}

}  // namespace
}  // namespace gradwire::cuda
