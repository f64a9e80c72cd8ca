// What every codec promises (codec/codec.h). A new one joins the list at the end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include "codec_reference.h"
#include "gradwire/base/error.h"
#include "gradwire/base/op.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {
namespace codec_conformance_test {

using Values = std::vector<float>;
using Payload = std::vector<std::byte>;

constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kLeast = std::numeric_limits<float>::denorm_min();

struct Family {
  const char* name;
  float (*draw)(std::size_t i, std::mt19937_64& random);
};

float normal(std::size_t, std::mt19937_64& random) { return draw_float(Data::kNormal, random); }

// All finite.
constexpr Family kFamilies[] = {
    {"normal", normal},
    {"huge", [](std::size_t, auto& random) { return draw_float(Data::kHuge, random); }},
    {"denormal", [](std::size_t, auto& random) { return draw_float(Data::kDenormal, random); }},
    {"zero", [](std::size_t, auto&) { return 0.0F; }},
    {"signed zeros", [](std::size_t i, auto&) { return i % 3 == 0 ? -0.0F : 0.0F; }},
    {"constant", [](std::size_t, auto&) { return -0.3F; }},
    {"largest", [](std::size_t, auto&) { return kMost; }},
    {"largest of both signs",
     [](std::size_t, auto& random) { return random() % 2 ? kMost : -kMost; }},
    {"least", [](std::size_t i, auto&) { return i % 2 == 0 ? kLeast : -kLeast; }},
    {"from least to largest",
     [](std::size_t, auto& random) {
       const float value = draw_float(Data::kRandomBits, random);
       return std::isfinite(value) ? value : 0x1p-100F;
     }},
    {"one in 20 is zero",
     [](std::size_t i, auto& random) { return random() % 20 ? normal(i, random) : 0.0F; }},
    {"one in 10 is zero",
     [](std::size_t i, auto& random) { return random() % 10 ? normal(i, random) : 0.0F; }},
    {"one in 20 is not zero",
     [](std::size_t i, auto& random) { return random() % 20 ? -0.0F : normal(i, random); }},
};

bool all_finite(const Values& values) {
  return std::all_of(values.begin(), values.end(), [](float each) { return std::isfinite(each); });
}

std::vector<std::uint32_t> bits(const Values& values) {
  std::vector<std::uint32_t> all;
  for (float each : values) all.push_back(std::bit_cast<std::uint32_t>(each));
  return all;
}

struct Sent {
  Payload payload;
  Values error;
};

class CodecConformance : public testing::TestWithParam<std::string> {
 protected:
  Values draw(const Family& family, std::size_t n) {
    Values x(n);
    for (std::size_t i = 0; i < n; ++i) x[i] = family.draw(i, random_);
    return x;
  }
  Values draw(std::size_t n) { return draw(kFamilies[0], n); }

  std::vector<std::size_t> lengths() const {
    const std::size_t unit = codec_->block();
    std::vector<std::size_t> all = {0, 1, 2, 63, unit - 1, unit, unit + 1, 3 * unit + 7};
    return all;
  }
  std::size_t several() const { return 3 * codec_->block() + 37; }

  CodecState prepared(const Values& x, const Values& residual) const {
    CodecState codec_state;
    const float* e = residual.empty() ? nullptr : residual.data();
    codec_->prepare(x.data(), x.size(), {.residual = e, .codec_state = &codec_state});
    return codec_state;
  }

  // The run [begin, end) of an array.
  Sent encode(const Values& x, const Values& residual, CodecState codec_state, std::size_t begin,
              std::size_t end) const {
    Sent sent{Payload(codec_->max_bytes(end - begin)), Values(end - begin, 7.0F)};
    EncodeContext context{
        .call = 5, .element = begin, .error = sent.error.data(), .codec_state = &codec_state};
    if (!residual.empty()) context.residual = residual.data() + begin;
    sent.payload.resize(codec_->encode(x.data() + begin, end - begin, context, sent.payload));
    return sent;
  }
  Sent encode(const Values& x, const Values& residual = {}) const {
    return encode(x, residual, prepared(x, residual), 0, x.size());
  }

  Values decode(const Payload& payload, std::size_t n, bool finite = true) const {
    Values y(n, -3.0F);
    const Decoded decoded = codec_->decode(payload, y.data(), n);
    EXPECT_EQ(decoded.bytes, payload.size());
    EXPECT_EQ(decoded.finite, finite);
    EXPECT_EQ(all_finite(y), finite);
    return y;
  }

  // A decoder of foreign bytes throws, or decodes within them; in memory of their very size.
  void expect_harmless(const Payload& bytes, std::size_t n) const {
    const Payload in(bytes);
    Values y(n, 1.0F);
    try {
      EXPECT_LE(codec_->decode(in, y.data(), n).bytes, in.size());
      EXPECT_LE(codec_->decode_add(in, y.data(), n).bytes, in.size());
      const ConstBytes both[] = {in, in};
      EXPECT_EQ(codec_->decode_sum(both, y.data(), n).bytes, in.size());
    } catch (const InvalidArgument&) {
    }
  }

  std::shared_ptr<const Codec> codec_ = make_codec(GetParam());
  std::mt19937_64 random_{11};
};

TEST_P(CodecConformance, NameIsCanonical) {
  EXPECT_EQ(codec_->name(), GetParam());
  EXPECT_EQ(make_codec(codec_->name())->name(), codec_->name());
}

TEST_P(CodecConformance, ErrorIsWhatWasNotDelivered) {
  for (const Family& family : kFamilies)
    for (const std::size_t n : lengths())
      for (const bool fed_back : {false, true}) {
        SCOPED_TRACE(std::string(family.name) + ", n=" + std::to_string(n));
        const Values x = draw(family, n), residual = fed_back ? draw(n) : Values();
        const Sent sent = encode(x, residual);
        const Values y = decode(sent.payload, n);
        for (std::size_t i = 0; i < n; ++i) {
          const float v = fed_back ? x[i] + residual[i] : x[i];
          ASSERT_EQ(sent.error[i], v - y[i]) << i;
        }
      }
}

TEST_P(CodecConformance, WritesAtMostWhatItSays) {
  for (const Family& family : kFamilies)
    for (const std::size_t n : lengths()) {
      const std::size_t size = encode(draw(family, n)).payload.size();
      EXPECT_LE(size, codec_->max_bytes(n)) << family.name << " " << n;
      EXPECT_TRUE(!codec_->fixed_size() || size == codec_->max_bytes(n)) << family.name << " " << n;
    }
}

TEST_P(CodecConformance, SameInputsGiveTheSameBytes) {
  for (const Family& family : kFamilies) {
    const Values x = draw(family, several()), residual = draw(several());
    const Sent first = encode(x, residual), second = encode(x, residual);
    EXPECT_EQ(first.payload, second.payload) << family.name;
    EXPECT_EQ(bits(first.error), bits(second.error)) << family.name;
  }
}

TEST_P(CodecConformance, RunsCutAtUnitsGiveTheSameBytes) {
  for (const Family& family : kFamilies) {
    const std::size_t n = several(), unit = codec_->block();
    const Values x = draw(family, n), residual = draw(n);
    const CodecState codec_state = prepared(x, residual);
    Sent pieces;
    for (const auto& [begin, end] :
         {std::pair(std::size_t{0}, unit), std::pair(unit, 3 * unit), std::pair(3 * unit, n)}) {
      const Sent piece = encode(x, residual, codec_state, begin, end);
      pieces.payload.insert(pieces.payload.end(), piece.payload.begin(), piece.payload.end());
      pieces.error.insert(pieces.error.end(), piece.error.begin(), piece.error.end());
    }
    const Sent whole = encode(x, residual, codec_state, 0, n);
    EXPECT_EQ(pieces.payload, whole.payload) << family.name;
    EXPECT_EQ(bits(pieces.error), bits(whole.error)) << family.name;
  }
}

TEST_P(CodecConformance, ResidualAndErrorMayBeMissingOrTheSame) {
  const std::size_t n = several();
  const Values x = draw(n), residual = draw(n), sum = [&] {
    Values v(n);
    std::transform(x.begin(), x.end(), residual.begin(), v.begin(), std::plus<float>());
    return v;
  }();
  CodecState codec_state = prepared(x, residual);
  const Sent expected = encode(x, residual, codec_state, 0, n);
  const auto payload_of = [&](const Values& from, const float* fed_back, float* error) {
    Payload payload(codec_->max_bytes(n));
    CodecState own = codec_state;
    const EncodeContext context{
        .call = 5, .residual = fed_back, .error = error, .codec_state = &own};
    payload.resize(codec_->encode(from.data(), n, context, payload));
    return payload;
  };
  Values error(n), shared = residual;
  EXPECT_EQ(payload_of(x, residual.data(), nullptr), expected.payload);
  EXPECT_EQ(payload_of(sum, nullptr, nullptr), expected.payload);
  EXPECT_EQ(payload_of(sum, nullptr, error.data()), expected.payload);
  EXPECT_EQ(bits(error), bits(expected.error));
  EXPECT_EQ(payload_of(x, shared.data(), shared.data()), expected.payload);
  EXPECT_EQ(bits(shared), bits(expected.error));
}

TEST_P(CodecConformance, AlignmentDoesNotMatter) {
  const std::size_t n = several();
  const Values x = draw(n), expected_y = decode(encode(x).payload, n);
  const Sent expected = encode(x);
  for (std::size_t shift = 1; shift < 16; ++shift) {
    Values moved(n + 16), error(n + 16), y(n + 16, 5.0F);
    std::copy(x.begin(), x.end(), moved.begin() + static_cast<std::ptrdiff_t>(shift));
    CodecState codec_state = prepared(x, {});
    Payload message(shift + codec_->max_bytes(n));
    const EncodeContext context{
        .call = 5, .error = error.data() + 16 - shift, .codec_state = &codec_state};
    const std::size_t size =
        codec_->encode(moved.data() + shift, n, context, Bytes(message).subspan(shift));
    const ConstBytes payload = ConstBytes(message).subspan(shift, size);
    ASSERT_TRUE(std::equal(payload.begin(), payload.end(), expected.payload.begin(),
                           expected.payload.end()));
    codec_->decode(payload, y.data() + shift, n);
    ASSERT_EQ(std::memcmp(error.data() + 16 - shift, expected.error.data(), 4 * n), 0);
    ASSERT_EQ(std::memcmp(y.data() + shift, expected_y.data(), 4 * n), 0);
    ASSERT_EQ(y[shift - 1], 5.0F);
    ASSERT_EQ(y[shift + n], 5.0F);
  }
}

TEST_P(CodecConformance, UntouchedElementsStayZero) {
  const std::size_t n = several();
  for (const Family& family : kFamilies) {
    Values x = draw(family, n);
    for (std::size_t i = 0; i < n; ++i)
      if (i % 5 < 2) x[i] = 0;
    const Values y = decode(encode(x).payload, n);
    for (std::size_t i = 0; i < n; ++i) ASSERT_TRUE(i % 5 >= 2 || y[i] == 0) << family.name;
  }
}

TEST_P(CodecConformance, NanAndInfAreSeenAndBookNothing) {
  const std::size_t n = 2 * codec_->block() + 5;
  for (const float poison : {NAN, -NAN, INFINITY, -INFINITY})
    for (std::size_t trial = 0; trial < 50; ++trial) {
      const std::size_t at = trial < 40 ? trial % n : random_() % n;
      Values x = draw(kFamilies[trial % 2 == 0 ? 0 : std::size(kFamilies) - 1], n);
      x[at] = poison;
      const Sent sent = encode(x, draw(n));
      decode(sent.payload, n, /*finite=*/false);
      EXPECT_EQ(sent.error[at], 0) << at;
      EXPECT_TRUE(all_finite(sent.error)) << at;
    }
}

TEST_P(CodecConformance, AnOverflowOfTheResidualIsSeen) {
  const Sent sent = encode(Values(33, kMost), Values(33, kMost));
  decode(sent.payload, 33, /*finite=*/false);
  EXPECT_EQ(sent.error, Values(33, 0.0F));
}

TEST_P(CodecConformance, DecodeAddAddsInFloat32) {
  for (const Family& family : kFamilies)
    for (const std::size_t n : lengths()) {
      const Payload payload = encode(draw(family, n)).payload;
      const Values decoded = decode(payload, n);
      Values y = draw(n), expected = y;
      for (std::size_t i = 0; i < n; ++i) expected[i] += decoded[i];
      EXPECT_EQ(codec_->decode_add(payload, y.data(), n).bytes, payload.size());
      EXPECT_EQ(bits(y), bits(expected)) << family.name << " " << n;
    }
}

TEST_P(CodecConformance, DecodeSumAddsAllPayloads) {
  for (const std::size_t n : lengths())
    for (const std::size_t count : {1, 2, 3, 4, 5, 8, 9, 70}) {
      std::vector<Payload> payloads;
      std::vector<double> sum(n), magnitude(n);
      for (std::size_t p = 0; p < count; ++p) {
        payloads.push_back(encode(draw(kFamilies[p % 3 == 2 ? 11 : 0], n)).payload);
        const Values each = decode(payloads.back(), n);
        for (std::size_t i = 0; i < n; ++i) sum[i] += each[i], magnitude[i] += std::fabs(each[i]);
      }
      const std::vector<ConstBytes> views(payloads.begin(), payloads.end());
      Values y(n, 3.0F);
      const Decoded decoded = codec_->decode_sum(views, y.data(), n);
      EXPECT_EQ(decoded.bytes, payloads[0].size());
      EXPECT_TRUE(decoded.finite);
      for (std::size_t i = 0; i < n; ++i)
        ASSERT_NEAR(y[i], sum[i], 0x1p-24 * static_cast<double>(count) * magnitude[i]) << count;
      EXPECT_TRUE(count > 1 || bits(y) == bits(decode(payloads[0], n)));
    }
}

TEST_P(CodecConformance, DecodeSumConsumesEachPayloadWholeAndReportsNan) {
  const std::size_t n = codec_->block() + 3;
  Values x = draw(n), y(n);
  const Payload good = encode(x).payload;
  x[n / 2] = NAN;
  const Payload bad = encode(x).payload;
  Payload longer = good;
  longer.push_back(std::byte{0});
  const ConstBytes poisoned[] = {good, bad}, too_long[] = {good, longer};
  EXPECT_FALSE(codec_->decode_sum(poisoned, y.data(), n).finite);
  EXPECT_THROW(codec_->decode_sum(too_long, y.data(), n), InvalidArgument);
}

TEST_P(CodecConformance, TruncatedPayloadsAreRefused) {
  for (const std::size_t n : {std::size_t{1}, codec_->block() + 9})
    for (const std::size_t family : {0, 11}) {
      const Payload payload = encode(draw(kFamilies[family], n)).payload;
      Values y(n);
      for (std::size_t size = 0; size < payload.size(); ++size) {
        const Payload cut(payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(size));
        EXPECT_THROW(codec_->decode(cut, y.data(), n), InvalidArgument) << size;
        EXPECT_THROW(codec_->decode_add(cut, y.data(), n), InvalidArgument) << size;
        const ConstBytes one[] = {cut};
        EXPECT_THROW(codec_->decode_sum(one, y.data(), n), InvalidArgument) << size;
      }
    }
}

TEST_P(CodecConformance, ForeignBytesAreHarmless) {
  for (int trial = 0; trial < 400; ++trial) {
    const std::size_t n = random_() % (2 * codec_->block() + 50);
    Payload bytes(random_() % (codec_->max_bytes(n) + 9));
    for (std::byte& each : bytes) each = static_cast<std::byte>(random_());
    expect_harmless(bytes, n);
  }
}

TEST_P(CodecConformance, AlteredPayloadsAreHarmless) {
  for (int trial = 0; trial < 400; ++trial) {
    const std::size_t n = 1 + random_() % (2 * codec_->block() + 50);
    Payload payload = encode(draw(kFamilies[random_() % std::size(kFamilies)], n)).payload;
    if (payload.empty()) continue;
    for (std::size_t changes = 1 + random_() % 4; changes > 0; --changes)
      payload[random_() %
              (trial % 2 == 0 ? payload.size() : std::min<std::size_t>(12, payload.size()))] =
          static_cast<std::byte>(random_());
    expect_harmless(payload, n);
  }
}

TEST_P(CodecConformance, RefusesOutputThatCouldBeTooShort) {
  const Values x = draw(100);
  CodecState codec_state = prepared(x, {});
  const EncodeContext context{.codec_state = &codec_state};
  Payload payload(codec_->max_bytes(100) - 1);
  EXPECT_THROW(codec_->encode(x.data(), 100, context, payload), InvalidArgument);
}

TEST_P(CodecConformance, NothingIsEmpty) {
  EXPECT_EQ(codec_->max_bytes(0), 0U);
  EXPECT_EQ(codec_->encode(nullptr, 0, {}, {}), 0U);
  EXPECT_EQ(codec_->decode({}, nullptr, 0).bytes, 0U);
  EXPECT_EQ(codec_->decode_add({}, nullptr, 0).bytes, 0U);
}

TEST_P(CodecConformance, FeedbackDeliversEverythingInTheEnd) {
  const std::size_t n = codec_->block() + 21;
  std::vector<double> given(n), delivered(n);
  Values residual(n);
  double most = 0;
  for (int call = 0; call < 100; ++call) {
    const Values x = draw(n);
    Sent sent = encode(x, residual);
    const Values y = decode(sent.payload, n);
    for (std::size_t i = 0; i < n; ++i) given[i] += x[i], delivered[i] += y[i];
    residual = std::move(sent.error);
    for (std::size_t i = 0; i < n; ++i) most = std::max<double>(most, std::fabs(residual[i]));
  }
  for (std::size_t i = 0; i < n; ++i)
    ASSERT_NEAR(delivered[i] + residual[i], given[i], 1e-5 * most + 1e-3) << i;
}

constexpr const char* kSpecs[] = {"none",
                                  "fp16",
                                  "bf16",
                                  "int8",
                                  "int8:block=64",
                                  "int8:rounding=stochastic,seed=7",
                                  "int4",
                                  "int4:block=128",
                                  "int4:rounding=stochastic,seed=7",
                                  "onebit",
                                  "onebit:block=32",
                                  "threshold",
                                  "threshold:density=0.1",
                                  "threshold:tau=0.5",
                                  "topk",
                                  "topk:density=0.1",
                                  "topk:density=0.01,values=fp16",
                                  "topk:density=0.1,values=2bit",

                                  "lossless"};

// These, and every other codec as it is without parameters.
std::vector<std::string> specs() {
  std::vector<std::string> all(std::begin(kSpecs), std::end(kSpecs));
  for (const std::string_view name : codec_names())
    if (std::ranges::find(all, name) == all.end() &&
        make_codec(name)->combine() != Combine::kCompound)
      all.emplace_back(name);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Codecs, CodecConformance, testing::ValuesIn(specs()),
                         [](const auto& each) {
                           std::string name = each.param;
                           std::erase_if(name, [](char c) { return std::isalnum(c) == 0; });
                           return name;
                         });

void add(Fnv1a& hash, const auto& values) {
  hash.bytes(values.data(), values.size() * sizeof values[0]);
}

// A digest of all that codecs write, for values of every family.
std::uint64_t digest() {
  Fnv1a hash;
  std::mt19937_64 random(5);
  for (const char* spec : kSpecs)
    for (const Family& family : kFamilies) {
      const auto codec = make_codec(spec);
      const std::size_t n = codec->block() + 37;
      Values x(n), residual(n), error(n), y(n);
      for (std::size_t i = 0; i < n; ++i) x[i] = family.draw(i, random);
      for (std::size_t i = 0; i < n; ++i) residual[i] = normal(i, random);
      CodecState codec_state;
      Payload payload(codec->max_bytes(n));
      const EncodeContext context{.call = 5,
                                  .residual = residual.data(),
                                  .error = error.data(),
                                  .codec_state = &codec_state};
      codec->prepare(x.data(), n, context);
      payload.resize(codec->encode(x.data(), n, context, payload));
      codec->decode(payload, y.data(), n);
      codec->decode_add(payload, y.data(), n);
      add(hash, payload);
      add(hash, error);
      add(hash, y);
      const std::vector<ConstBytes> five(5, payload);
      codec->decode_sum(five, y.data(), n);
      add(hash, y);
    }
  return hash.digest();
}

TEST(Digest, OfTheActiveTable) {
  std::cout << "by " << kernels().name << ": " << digest() << "." << std::endl;
}

// What the test above prints in a process of its own: the choice is made once.
std::string printed_with(const std::string& table) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command = "GTEST_TOTAL_SHARDS=1 GTEST_SHARD_INDEX=0 GRADWIRE_SIMD=" + table +
                              " '" + self + "' --gtest_filter=Digest.OfTheActiveTable";
  std::FILE* output = popen(command.c_str(), "r");
  std::string text;
  for (int c = std::fgetc(output); c != EOF; c = std::fgetc(output)) text += static_cast<char>(c);
  EXPECT_EQ(pclose(output), 0);
  return text;
}

TEST(Digest, IsTheSameOfAllTables) {
  const std::string own = std::to_string(digest());
  for (const Kernels* table : available_kernels()) {
    const std::string expected = "by " + std::string(table->name) + ": " + own + ".";
    EXPECT_NE(printed_with(table->name).find(expected), std::string::npos) << expected;
  }
}

TEST(CodecList, EveryCodecIsMadeByItsName) {
  for (const std::string_view name : codec_names())
    EXPECT_EQ(make_codec(name)->name().substr(0, name.size()), name);
}

TEST(CodecList, CodecsOfSumsMayEncodeBetweenSitesAlone) {
  for (const std::string_view each : codec_names()) {
    const std::string name(each);
    if (make_codec(name)->combine() != Combine::kReencode) {
      EXPECT_THROW(make_codec(name + ":between=sites"), InvalidArgument) << name;
      continue;
    }
    EXPECT_FALSE(make_codec(name)->between_sites());
    EXPECT_FALSE(make_codec(name + ":between=ranks")->between_sites());
    EXPECT_TRUE(make_codec(name + ":between=sites")->between_sites());
    EXPECT_EQ(make_codec(name + ":between=sites")->name(), name + ":between=sites");
  }
  EXPECT_EQ(make_codec("int8:block=64,between=sites")->name(), "int8:between=sites,block=64");
  EXPECT_THROW(make_codec("int8:between=hosts"), InvalidArgument);
}

}  // namespace codec_conformance_test
}  // namespace gradwire::codec
