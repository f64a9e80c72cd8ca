#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "codec_payloads.h"
#include "codec_reference.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {
namespace codec_cast_test {

using Halves = std::vector<std::uint16_t>;

Bytes bytes_of(Halves& halves) { return std::as_writable_bytes(std::span(halves)); }

EncodeContext booking(float* error) {
  EncodeContext context;
  context.error = error;
  return context;
}

Halves halves_of(const Codec& codec, const Values& x, float* error = nullptr) {
  Halves out(x.size());
  EXPECT_EQ(codec.encode(x.data(), x.size(), booking(error), bytes_of(out)), 2 * x.size());
  return out;
}

Values values_of(const Codec& codec, Halves in) {
  Values y(in.size());
  EXPECT_EQ(codec.decode(bytes_of(in), y.data(), y.size()).bytes, 2 * y.size());
  return y;
}

Halves every_pattern() {
  Halves all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}

Values samples(Data data) {
  std::mt19937_64 random(3);
  Values x(100'001);
  for (float& value : x) value = draw_float(data, random);
  return x;
}

std::uint32_t bits(float value) { return std::bit_cast<std::uint32_t>(value); }

struct Case {
  const char* spec;
  Format format;
};

class Cast : public testing::TestWithParam<Case> {
 protected:
  const Format& format() const { return GetParam().format; }
  float largest() const { return static_cast<float>(format().decode(format().infinity() - 1)); }
  // The definition: round to nearest even, but finite stays finite.
  std::uint16_t expected(float x) const {
    const std::uint64_t rounded = format().encode(x);
    const bool overflow =
        std::isfinite(x) && (rounded & (format().sign() - 1)) == format().infinity();
    return static_cast<std::uint16_t>(rounded - (overflow ? 1 : 0));
  }

  std::shared_ptr<const Codec> codec_ = make_codec(GetParam().spec);
};

TEST_P(Cast, DecodesEveryPatternExactly) {
  const Halves all = every_pattern();
  const Values y = values_of(*codec_, all);
  for (std::size_t h = 0; h < all.size(); ++h) {
    if (format().is_nan(h))
      ASSERT_TRUE(std::isnan(y[h])) << h;
    else
      ASSERT_EQ(bits(y[h]), bits(static_cast<float>(format().decode(h)))) << h;
  }
}

TEST_P(Cast, EncodingADecodedPatternGivesItBack) {
  const Halves all = every_pattern();
  const Halves again = halves_of(*codec_, values_of(*codec_, all));
  const std::uint64_t quiet = format().quiet_nan() & ~format().infinity();
  for (std::size_t h = 0; h < all.size(); ++h)
    ASSERT_EQ(again[h], format().is_nan(h) ? h | quiet : h);
}

TEST_P(Cast, RoundsEveryMidpointToEven) {
  Values midpoints;
  for (std::uint64_t h = 0; h + 1 < format().infinity(); ++h)
    for (float sign : {1.0F, -1.0F}) {
      const double middle = (format().decode(h) + format().decode(h + 1)) / 2;
      const float tie = sign * static_cast<float>(middle);
      midpoints.insert(midpoints.end(),
                       {std::nextafter(tie, 0.0F), tie, std::nextafter(tie, sign)});
    }
  const Halves sent = halves_of(*codec_, midpoints);
  for (std::size_t i = 0; i < midpoints.size(); ++i)
    ASSERT_EQ(sent[i], expected(midpoints[i])) << midpoints[i];
}

TEST_P(Cast, EncodesLikeTheDefinition) {
  for (Data data : kAllData) {
    const Values x = samples(data);
    const Halves sent = halves_of(*codec_, x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (std::isnan(x[i]))
        ASSERT_TRUE(format().is_nan(sent[i])) << bits(x[i]);
      else
        ASSERT_EQ(sent[i], expected(x[i])) << bits(x[i]);
    }
  }
}

TEST_P(Cast, FiniteSaturatesAndTheExcessIsBooked) {
  const float most = std::numeric_limits<float>::max();
  const Values x = {most, -most, largest(), INFINITY, -INFINITY, NAN};
  Values error(x.size(), 0.5F);
  const Values y = values_of(*codec_, halves_of(*codec_, x, error.data()));
  EXPECT_EQ(y[0], largest());
  EXPECT_EQ(y[1], -largest());
  EXPECT_EQ(y[2], largest());
  EXPECT_EQ(y[3], INFINITY);
  EXPECT_EQ(y[4], -INFINITY);
  EXPECT_TRUE(std::isnan(y[5]));
  const Values booked = {most - largest(), largest() - most, 0, 0, 0, 0};
  EXPECT_EQ(error, booked);
}

TEST_P(Cast, DeliveredPlusErrorIsTheInput) {
  for (Data data : {Data::kNormal, Data::kDenormal, Data::kRandomBits}) {
    Values x = samples(data);
    // Above 2^29 the excess over 65504 has more digits than float32.
    std::erase_if(x, [](float value) { return !(std::fabs(value) < 0x1p29F); });
    Values error(x.size());
    const Values y = values_of(*codec_, halves_of(*codec_, x, error.data()));
    for (std::size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(static_cast<double>(y[i]) + error[i], x[i]) << bits(x[i]);
  }
}

TEST_P(Cast, DecodeAddAddsInFloat32) {
  Halves in = halves_of(*codec_, samples(Data::kNormal));
  const Values decoded = values_of(*codec_, in);
  Values y = samples(Data::kRandomBits);
  Values sum = y;
  EXPECT_EQ(codec_->decode_add(bytes_of(in), sum.data(), sum.size()).bytes, 2 * sum.size());
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (std::isnan(y[i]))
      ASSERT_EQ(bits(sum[i]), kFloat32Format.quiet_nan());
    else
      ASSERT_EQ(bits(sum[i]), bits(y[i] + decoded[i]));
  }
}

TEST_P(Cast, PayloadsFollowEachOtherAtAnyAlignment) {
  const Values x = samples(Data::kNormal);
  const Halves whole = halves_of(*codec_, x);
  std::vector<std::byte> message(1 + 2 * x.size());
  std::size_t used = 1, done = 0;
  for (std::size_t n : {std::size_t{3}, std::size_t{0}, std::size_t{1000}, x.size() - 1003}) {
    used += codec_->encode(x.data() + done, n, {}, Bytes(message).subspan(used));
    done += n;
  }
  EXPECT_EQ(used, message.size());
  EXPECT_EQ(std::memcmp(message.data() + 1, whole.data(), 2 * x.size()), 0);
  Values y(3);
  EXPECT_EQ(codec_->decode(ConstBytes(message).subspan(1), y.data(), 3).bytes, 6U);
  EXPECT_EQ(y, values_of(*codec_, {whole.begin(), whole.begin() + 3}));
}

INSTANTIATE_TEST_SUITE_P(All, Cast,
                         testing::Values(Case{"fp16", kFp16Format}, Case{"bf16", kBf16Format}),
                         [](const auto& each) { return std::string(each.param.spec); });

TEST(ScaledFp16, KeepsSmallGradientsThatPlainFp16Loses) {
  const Values x = {0x1.8p-30F, -0x1.004p-40F, 0, 0x1p-126F};
  EXPECT_EQ(values_of(*make_codec("fp16"), halves_of(*make_codec("fp16"), x)),
            (Values{0, 0, 0, 0}));
  const auto scaled = make_codec("fp16:scale=1099511627776");  // 2^40
  EXPECT_EQ(values_of(*scaled, halves_of(*scaled, x)), (Values{0x1.8p-30F, -0x1.004p-40F, 0, 0}));
}

TEST(ScaledFp16, SaturatesAtTheScaledLimitAndBooksTheRest) {
  for (const char* spec : {"fp16:scale=1024", "fp16:scale=0.0009765625"}) {
    const auto codec = make_codec(spec);
    const float limit =
        std::string(spec).find("1024") != std::string::npos ? 65504.0F / 1024 : 65504.0F * 1024;
    const Values x = {2 * limit, -2 * limit, std::numeric_limits<float>::max(), INFINITY, limit};
    Values error(x.size());
    const Values y = values_of(*codec, halves_of(*codec, x, error.data()));
    EXPECT_EQ(y, (Values{limit, -limit, limit, INFINITY, limit})) << spec;
    EXPECT_EQ(error, (Values{limit, -limit, x[2] - limit, 0, 0})) << spec;
  }
}

TEST(ScaledFp16, DeliveredPlusErrorIsTheInputAtTheExtremeScales) {
  for (const char* spec :
       {"fp16:scale=1.2676506002282294e+30", "fp16:scale=7.888609052210118e-31"}) {
    const auto codec = make_codec(spec);
    EXPECT_EQ(codec->name(), spec);
    Values x = samples(Data::kRandomBits);
    const float limit = 65504.0F / static_cast<float>(std::stod(std::string(spec).substr(11)));
    std::erase_if(x, [&](float value) { return !(std::fabs(value) < limit); });
    ASSERT_GT(x.size(), 1000U);
    Values error(x.size());
    const Values y = values_of(*codec, halves_of(*codec, x, error.data()));
    for (std::size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(static_cast<double>(y[i]) + error[i], x[i]) << spec << " " << bits(x[i]);
  }
}

TEST(NoneCodec, IsACopyAndASum) {
  const auto codec = make_codec("none");
  const Values x = samples(Data::kRandomBits);
  std::vector<std::byte> message(1 + 4 * x.size());
  const Bytes payload = Bytes(message).subspan(1);
  Values error(x.size(), 3), y(x.size());
  EXPECT_EQ(codec->encode(x.data(), x.size(), booking(error.data()), payload), 4 * x.size());
  EXPECT_EQ(error, Values(x.size(), 0));
  EXPECT_EQ(codec->decode(payload, y.data(), y.size()).bytes, 4 * x.size());
  EXPECT_EQ(std::memcmp(x.data(), y.data(), 4 * x.size()), 0);
  Values sum(x.size(), 1);
  EXPECT_EQ(codec->decode_add(payload, sum.data(), sum.size()).bytes, 4 * x.size());
  for (std::size_t i = 0; i < x.size(); ++i)
    ASSERT_TRUE(std::isnan(x[i]) || sum[i] == 1 + x[i]) << x[i];
}

TEST(Registry, NamesAreCanonical) {
  for (const char* spec : {"none", "fp16", "bf16", "fp16:scale=1024", "fp16:scale=0.0078125"})
    EXPECT_EQ(make_codec(spec)->name(), spec);
  EXPECT_EQ(make_codec("fp16:scale=1")->name(), "fp16");
  EXPECT_EQ(make_codec("fp16:scale=1024.0")->name(), "fp16:scale=1024");
}

TEST(Registry, RefusalsSayWhatIsKnown) {
  const std::pair<const char*, const char*> cases[] = {
      {"zip", "none, fp16, bf16"},
      {"", "none, fp16, bf16"},
      {"fp16:speed=2", "takes scale"},
      {"bf16:scale=2", "takes none"},
      {"fp16:scale", "not key=value"},
      {"fp16:=2", "not key=value"},
      {"fp16:scale=two", "not a number"},
      {"fp16:scale=2x", "not a number"},
      {"fp16:scale=2,scale=2", "given twice"},
      {"fp16:scale=3", "power of two"},
      {"fp16:scale=0", "power of two"},
      {"fp16:scale=-2", "power of two"},
      {"fp16:scale=inf", "power of two"},
      {"fp16:scale=nan", "power of two"},
      {"fp16:scale=1e31", "power of two"},
      {"fp16:scale=2535301200456458802993406410752", "power of two"},  // 2^101
  };
  for (const auto& [name, text] : cases) expect_refused(name, text);
}

}  // namespace codec_cast_test
}  // namespace gradwire::codec
