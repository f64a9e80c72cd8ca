// topk on the device: the bytes and errors of the CPU's (codec/topk.cc).
#include <gtest/gtest.h>

#include "cuda_sparse.h"

namespace gradwire::cuda {
namespace {

constexpr const char* kSpecs[] = {"topk",
                                  "topk:density=0.01,values=fp16",
                                  "topk:density=0.1",
                                  "topk:density=0.1,values=bf16",
                                  "topk:density=0.6",
                                  "topk:density=0.97,values=fp16",
                                  "topk:density=1",
                                  "topk:density=0.015625,values=2bit",
                                  "topk:density=1,values=2bit"};

Values values_of(const codec::Codec& codec) {
  using Of = codec::Definition::Values;
  const Of values = codec.definition().values;
  return values == Of::kFp16      ? Values::kFp16
         : values == Of::kBf16    ? Values::kBf16
         : values == Of::kTwoBits ? Values::kTwoBits
                                  : Values::kFloat32;
}

std::size_t slot_bytes(const codec::Codec& codec) { return aligned(codec.max_bytes(kUnit)); }

Decode decoder(const codec::Codec& codec) {
  return [&codec](const cuda::GpuSpan& run, const Decoding& how, std::uint32_t* flags) {
    return api().topk_decode_spans(slot_bytes(codec), values_of(codec), &run, 1, how, flags,
                                   stream());
  };
}

std::size_t units_of(std::size_t n) { return (n + kUnit - 1) / kUnit; }

void encode(const codec::Codec& codec, const float* x, const SpanFeedback& span_feedback,
            std::size_t n, const SlotArray& slots) {
  const DeviceArray<std::byte> scratch(Payload(api().topk_scratch_bytes(units_of(n))), 0);
  const cuda::GpuSpan run{.x = x, .n = n, .span_feedback = span_feedback};
  EXPECT_EQ(api().topk_encode_spans(codec.definition().density, values_of(codec), slot_bytes(codec),
                                    &run, 1, {.out = slots.data()}, scratch.data(), stream()),
            0);
  scratch.values();
}

// One call. residual: empty without feedback, else becomes e'.
void expect_call(const codec::Codec& codec, const Floats& x, Floats& residual,
                 std::uint32_t which) {
  const Encoded expected = encode_on_cpu(codec, x, residual, nullptr);
  const Key key(residual, which, {});
  const DeviceArray<float> in(x, 1);
  const SlotArray slots(units_of(x.size()), slot_bytes(codec));
  encode(codec, in.data(), key.span_feedback, x.size(), slots);
  EXPECT_TRUE(slots.units() == expected.units);
  for (const bool add : {false, true})
    expect_decoded(decode_slots(decoder(codec), slots, x, add), codec, expected.units, x, add);
  if (residual.empty()) return;
  EXPECT_TRUE(bits(key.e.values()) == bits(residual)) << "changed";
  EXPECT_TRUE(bits(key.next.values()) == bits(expected.error));
  residual = expected.error;
}

TEST(CudaTopK, SendsWhatTheCpuSends) {
  std::mt19937_64 random(1);
  for (const Family& family : kFamilies)
    for (const char* spec :
         {kSpecs[random() % 4], kSpecs[4 + random() % 3], kSpecs[7], kSpecs[8]}) {
      const std::size_t lengths[] = {1, 40, kUnit - 1 - random() % 999, kUnit, 2 * kUnit + 33};
      const std::size_t n = lengths[random() % std::size(lengths)];
      SCOPED_TRACE(std::string(spec) + ", " + family.name + ", n=" + std::to_string(n));
      Floats residual = random() % 2 == 0 ? draw(kFamilies[0], n, random) : Floats();
      expect_call(*codec::make_codec(spec), draw(family, n, random), residual, random() % 2);
    }
}

// More than there are blocks on the simulated device.
TEST(CudaTopK, TakesUnitAfterUnit) {
  std::mt19937_64 random(7);
  Floats residual(4 * kUnit + 5, 0.25F);
  expect_call(*codec::make_codec(kSpecs[2]), draw(kFamilies[0], residual.size(), random), residual,
              1);
}

TEST(CudaTopK, TiesGoToTheLowerIndex) {
  std::mt19937_64 random(2);
  for (const char* spec : {kSpecs[0], kSpecs[3], kSpecs[4]})
    for (const unsigned values : {1, 2, 5, 300}) {
      Floats x(kUnit - random() % 999), none;
      for (float& each : x) each = static_cast<float>(random() % values) - 2.0F;
      SCOPED_TRACE(std::string(spec) + ", " + std::to_string(values));
      expect_call(*codec::make_codec(spec), x, none, 0);
    }
}

TEST(CudaTopK, FeedsBackOverCalls) {
  std::mt19937_64 random(3);
  for (const char* spec : {kSpecs[0], kSpecs[1], kSpecs[3], kSpecs[6], kSpecs[7]}) {
    Floats residual(kUnit + 77);
    for (std::uint32_t call = 0; call < 2; ++call) {
      SCOPED_TRACE(std::string(spec) + ", call " + std::to_string(call));
      const Floats x = draw(kFamilies[call == 1 ? 1 : 0], residual.size(), random);
      expect_call(*codec::make_codec(spec), x, residual, call % 2);
    }
  }
}

TEST(CudaTopK, WorksInPlaceAndWithoutAKey) {
  std::mt19937_64 random(4);
  const auto codec = codec::make_codec(kSpecs[3]);
  const std::size_t n = 1000;
  const Floats x = draw(kFamilies[0], n, random), residual = draw(kFamilies[0], n, random);
  const DeviceArray<float> in(x);
  const SlotArray slots(1, slot_bytes(*codec));
  encode(*codec, in.data(), {}, n, slots);
  EXPECT_TRUE(slots.units() == encode_on_cpu(*codec, x, {}, nullptr).units);

  const Key key(residual, 0, {});
  const Encoded fed_back = encode_on_cpu(*codec, x, residual, nullptr);
  encode(*codec, in.data(), {{key.e.data(), key.e.data()}, key.key_state.data()}, n, slots);
  EXPECT_TRUE(slots.units() == fed_back.units);
  EXPECT_TRUE(bits(key.e.values()) == bits(fed_back.error));
}

// ---- Foreign bytes -----------------------------------------------------------------------------

TEST(CudaTopK, RefusesWhatTheCpuRefuses) {
  std::mt19937_64 random(5);
  for (const char* spec : {kSpecs[0], kSpecs[1], kSpecs[2], kSpecs[4], kSpecs[8]}) {
    const auto codec = codec::make_codec(spec);
    std::vector<Payload> units = hostile_units(*codec, 12, kUnit, random);
    const std::size_t rest = 1 + random() % 2000;
    units.push_back(hostile_units(*codec, 1, rest, random)[0]);
    const Floats y = draw(kFamilies[0], 12 * kUnit + rest, random);
    for (const bool add : {false, true}) expect_the_cpus(decoder(*codec), *codec, units, y, add);
  }
}

TEST(CudaTopK, ReadsWhatWasCutOffAsTheCpu) {
  std::mt19937_64 random(6);
  for (const std::size_t n : {std::size_t{1}, std::size_t{300}, std::size_t{2000}})
    for (const char* spec : {kSpecs[0], kSpecs[3], kSpecs[6], kSpecs[7], kSpecs[8]}) {
      const auto codec = codec::make_codec(spec);
      const Floats x = draw(kFamilies[0], n, random), y = draw(kFamilies[0], n, random);
      const Payload whole = encode_on_cpu(*codec, x, {}, nullptr).units[0];
      for (std::size_t size = 0; size <= whole.size(); size += 1 + whole.size() / 20) {
        const std::vector<Payload> cut = {
            Payload(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size))};
        expect_the_cpus(decoder(*codec), *codec, cut, y, true);
      }
    }
}

TEST(CudaTopK, ReportsValuesThatAreNotFinite) {
  for (const char* spec : {"topk", "topk:values=fp16", "topk:values=bf16"}) {
    const auto codec = codec::make_codec(spec);
    std::vector<Payload> units = encode_on_cpu(*codec, {1.0F}, {}, nullptr).units;
    units[0].back() = std::byte{0x7F};
    *(units[0].end() - 2) = std::byte{0xFF};
    SlotArray slots(1, slot_bytes(*codec));
    slots.set(units);
    for (const bool add : {false, true}) {
      const DecodedArray decoded = decode_slots(decoder(*codec), slots, {0.0F}, add);
      EXPECT_EQ(decoded.flags, kNotFinite) << spec;
      EXPECT_TRUE(std::isnan(decoded.y[0])) << spec;
    }
  }
}

TEST(CudaTopK, OfNothingDoesNothing) {
  EXPECT_EQ(api().topk_encode_spans(0.1, Values::kFp16, 16, nullptr, 0, {}, nullptr, stream()), 0);
  EXPECT_EQ(api().topk_decode_spans(16, Values::kFp16, nullptr, 0, {.payloads = {nullptr, 0, 1}},
                                    nullptr, stream()),
            0);
  wait_for_device();
}

}  // namespace
}  // namespace gradwire::cuda
