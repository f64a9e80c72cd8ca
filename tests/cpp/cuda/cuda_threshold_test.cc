// threshold on the device: the bytes, errors and adapted tau of the CPU's (codec/threshold.cc).
#include <gtest/gtest.h>

#include "cuda_sparse.h"

namespace gradwire::cuda {
namespace {

constexpr const char* kSpecs[] = {"threshold", "threshold:density=0.1", "threshold:density=0.7",
                                  "threshold:tau=0.5"};

constexpr std::size_t kSlotBytes = 8208;

Decode decoder() {
  return [](const cuda::GpuSpan& run, const Decoding& how, std::uint32_t* flags) {
    return api().threshold_decode_spans(&run, 1, how, flags, stream());
  };
}

class OnDevice {
 public:
  OnDevice(const codec::Codec& codec, std::size_t n)
      : of_(codec.definition()),
        n_(n),
        slots_((n + kUnit - 1) / kUnit, kSlotBytes),
        scratch_(Payload(api().threshold_scratch_bytes((n + kUnit - 1) / kUnit)), 0) {}

  void prepare(const float* x, const SpanFeedback& span_feedback) const {
    EXPECT_EQ(api().threshold_prepare(x, span_feedback, n_, of_.density, scratch_.data(), stream()),
              0);
    scratch_.values();
  }
  void encode(const float* x, const SpanFeedback& span_feedback) const {
    const cuda::GpuSpan run{.x = x, .n = n_, .span_feedback = span_feedback};
    EXPECT_EQ(api().threshold_encode_spans(of_.tau, of_.density, &run, 1, {.out = slots_.data()},
                                           scratch_.data(), stream()),
              0);
    EXPECT_EQ(api().threshold_adapt(n_, of_.density, span_feedback.key_state, stream()), 0);
    scratch_.values();
  }
  const SlotArray& slots() const { return slots_; }

 private:
  codec::Definition of_;
  std::size_t n_;
  SlotArray slots_;
  DeviceArray<std::byte> scratch_;
};

GpuCodecState on_device(const codec::CodecState& codec_state) {
  return {codec_state.tau, codec_state.sent, std::bit_cast<std::uint32_t>(codec_state.largest)};
}

void expect_same(const GpuCodecState& actual, const codec::CodecState& expected) {
  const GpuCodecState other = on_device(expected);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(actual.tau), std::bit_cast<std::uint32_t>(other.tau));
  EXPECT_EQ(actual.sent, other.sent);
  EXPECT_EQ(actual.largest, other.largest);
}

// One call. residual: empty without feedback, else becomes e'.
void expect_call(const codec::Codec& codec, const Floats& x, Floats& residual,
                 codec::CodecState& codec_state, std::uint32_t which, bool prepares = true) {
  const codec::FloatEnvironment environment;
  codec_state = {.tau = codec_state.tau};
  const Key key(residual, which, on_device(codec_state));
  const DeviceArray<float> in(x, 1);
  const OnDevice device(codec, x.size());
  if (prepares) {
    const float* e = residual.empty() ? nullptr : residual.data();
    codec.prepare(x.data(), x.size(), {.residual = e, .codec_state = &codec_state});
    device.prepare(in.data(), key.span_feedback);
  }
  const Encoded expected = encode_on_cpu(codec, x, residual, &codec_state);
  codec.adapt(x.size(), codec_state);
  device.encode(in.data(), key.span_feedback);
  EXPECT_TRUE(device.slots().units() == expected.units);
  expect_same(key.codec_state(), codec_state);
  EXPECT_TRUE(bits(key.e.values()) == bits(residual)) << "changed";
  for (const bool add : {false, true})
    expect_decoded(decode_slots(decoder(), device.slots(), x, add), codec, expected.units, x, add);
  if (residual.empty()) return;
  EXPECT_TRUE(bits(key.next.values()) == bits(expected.error));
  residual = expected.error;
}

TEST(CudaThreshold, SendsWhatTheCpuSends) {
  std::mt19937_64 random(1);
  for (const Family& family : kFamilies)
    for (const char* spec : {kSpecs[random() % 2], kSpecs[2 + random() % 2]}) {
      const std::size_t lengths[] = {1, 40, kUnit - 1 - random() % 999, kUnit, 2 * kUnit + 33};
      const std::size_t n = lengths[random() % std::size(lengths)];
      SCOPED_TRACE(std::string(spec) + ", " + family.name + ", n=" + std::to_string(n));
      Floats residual = random() % 2 == 0 ? draw(kFamilies[0], n, random) : Floats();
      codec::CodecState codec_state;
      expect_call(*codec::make_codec(spec), draw(family, n, random), residual, codec_state,
                  random() % 2);
    }
}

// More than there are blocks on the simulated device.
TEST(CudaThreshold, TakesUnitAfterUnit) {
  std::mt19937_64 random(12);
  Floats residual(4 * kUnit + 5, 0.25F);
  codec::CodecState codec_state;
  expect_call(*codec::make_codec(kSpecs[1]), draw(kFamilies[0], residual.size(), random), residual,
              codec_state, 0);
}

TEST(CudaThreshold, AdaptsAsTheCpuDoes) {
  std::mt19937_64 random(2);
  for (const char* spec : kSpecs) {
    const std::size_t n = kUnit + 77;
    Floats residual(n);
    codec::CodecState codec_state;
    for (std::uint32_t call = 0; call < 3; ++call) {
      SCOPED_TRACE(std::string(spec) + ", call " + std::to_string(call));
      expect_call(*codec::make_codec(spec), draw(kFamilies[call == 2 ? 1 : 0], n, random), residual,
                  codec_state, call % 2);
    }
  }
}

TEST(CudaThreshold, ChoosesUnitByUnitWhereNobodyPrepares) {
  std::mt19937_64 random(3);
  for (const Family& family : kFamilies)
    for (const char* spec : {kSpecs[random() % 3]}) {
      const std::size_t n = random() % 4 == 0 ? kUnit + 100 : 1 + random() % 3000;
      SCOPED_TRACE(std::string(spec) + ", " + family.name + ", n=" + std::to_string(n));
      Floats residual = random() % 2 == 0 ? draw(family, n, random) : Floats();
      codec::CodecState codec_state;
      expect_call(*codec::make_codec(spec), draw(family, n, random), residual, codec_state, 0,
                  /*prepares=*/false);
    }
}

TEST(CudaThreshold, WorksInPlaceAndWithoutAKey) {
  std::mt19937_64 random(4);
  const auto codec = codec::make_codec(kSpecs[1]);
  const std::size_t n = 1000;
  const Floats x = draw(kFamilies[0], n, random), residual = draw(kFamilies[0], n, random);
  const Encoded plain = encode_on_cpu(*codec, x, {}, nullptr);
  const Encoded fed_back = encode_on_cpu(*codec, x, residual, nullptr);
  const OnDevice device(*codec, n);
  const DeviceArray<float> in(x);
  device.encode(in.data(), {});
  EXPECT_TRUE(device.slots().units() == plain.units);

  const Key key(residual, 0, {});
  const SpanFeedback both{{key.e.data(), key.e.data()}, key.key_state.data()};
  device.encode(in.data(), both);
  EXPECT_TRUE(device.slots().units() == fed_back.units);
  EXPECT_TRUE(bits(key.e.values()) == bits(fed_back.error));
}

// A large array, of which a sample is looked at.
TEST(CudaThreshold, PreparesFromTheSameSample) {
  std::mt19937_64 random(5);
  for (const std::size_t n : {std::size_t{65536}, std::size_t{200001}})
    for (const std::size_t family : {0, 5, 13, 16})
      for (const double density : {0.001, 0.3}) {
        const Floats x = draw(kFamilies[family], n, random),
                     residual = draw(kFamilies[0], n, random);
        const auto codec = codec::make_codec("threshold:density=" + std::to_string(density));
        codec::CodecState expected;
        codec->prepare(x.data(), n, {.residual = residual.data(), .codec_state = &expected});
        const Key key(residual, 1, {});
        const DeviceArray<float> in(x);
        OnDevice(*codec, n).prepare(in.data(), key.span_feedback);
        expect_same(key.codec_state(), expected);
      }
}

TEST(CudaThreshold, AdaptsToAnything) {
  std::mt19937_64 random(6);
  for (int trial = 0; trial < 300; ++trial) {
    const double density = std::exp(-static_cast<double>(random() % 1000) / 80);
    const std::size_t n = random() % 100000;
    codec::CodecState codec_state{draw_float(codec::kAllData[random() % 5], random), 0,
                                  random() % (n + 1), 0};
    codec_state.largest = std::fabs(draw_float(codec::kAllData[random() % 5], random));
    if (trial % 2 == 0)
      codec_state.tau = codec_state.largest / static_cast<float>(1 + random() % 300);
    const Key key({}, trial % 2 == 0 ? 0 : 1, on_device(codec_state));
    const auto codec = codec::make_codec("threshold:density=" + std::to_string(density));
    codec->adapt(n, codec_state);
    api().threshold_adapt(n, codec->definition().density, key.span_feedback.key_state, stream());
    expect_same(key.codec_state(), codec_state);
  }
}

// ---- Foreign bytes -----------------------------------------------------------------------------

TEST(CudaThreshold, RefusesWhatTheCpuRefuses) {
  std::mt19937_64 random(7);
  for (const char* spec : {kSpecs[0], kSpecs[1], kSpecs[2]}) {
    const auto codec = codec::make_codec(spec);
    std::vector<Payload> units = hostile_units(*codec, 16, kUnit, random);
    const std::size_t rest = 1 + random() % 2000;
    units.push_back(hostile_units(*codec, 1, rest, random)[0]);
    const Floats y = draw(kFamilies[0], 16 * kUnit + rest, random);
    for (const bool add : {false, true}) expect_the_cpus(decoder(), *codec, units, y, add);
  }
}

TEST(CudaThreshold, ReadsWhatWasCutOffAsTheCpu) {
  std::mt19937_64 random(8);
  for (const std::size_t n : {std::size_t{1}, std::size_t{300}, std::size_t{2000}})
    for (const char* spec : {kSpecs[0], kSpecs[1], kSpecs[2]}) {
      const auto codec = codec::make_codec(spec);
      const Floats x = draw(kFamilies[0], n, random), y = draw(kFamilies[0], n, random);
      const Payload whole = encode_on_cpu(*codec, x, {}, nullptr).units[0];
      for (std::size_t size = 0; size <= whole.size(); size += 1 + whole.size() / 20) {
        const std::vector<Payload> cut = {
            Payload(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size))};
        expect_the_cpus(decoder(), *codec, cut, y, true);
      }
    }
}

// tau and signs behind any positions.
Payload with_signs(Payload positions, std::size_t count) {
  const float tau = 0.25F;
  const auto* bytes = reinterpret_cast<const std::byte*>(&tau);
  if (count > 0) positions.insert(positions.end(), bytes, bytes + 4);
  positions.insert(positions.end(), (count + 7) / 8, std::byte{0x35});
  return positions;
}

TEST(CudaThreshold, ReadsEveryLayoutWhateverItsCount) {
  std::mt19937_64 random(9);
  const auto codec = codec::make_codec(kSpecs[0]);
  std::vector<Payload> units;
  for (const std::size_t count : {0, 1, 2, 127, 128, 1000, 20000, 32767}) {
    const auto index = draw_index(count, kUnit, random);
    units.push_back(with_signs(as_list(index), count));
    for (const unsigned low : {0U, 1U, 5U, 9U, 15U})
      units.push_back(with_signs(as_gaps(index, low), count));
  }
  std::erase_if(units, [](const Payload& each) { return each.size() > kSlotBytes; });
  const Floats y = draw(kFamilies[0], units.size() * kUnit, random);
  EXPECT_EQ(expect_the_cpus(decoder(), *codec, units, y, true), 0U);
}

Payload bytes_of(std::initializer_list<unsigned> values) {
  Payload all;
  for (const unsigned each : values) all.push_back(static_cast<std::byte>(each));
  return all;
}

// Behind a good unit, whose remains must not help.
void expect_refused(const Payload& unit, std::size_t n, const char* why) {
  SCOPED_TRACE(why);
  const auto codec = codec::make_codec(kSpecs[0]);
  std::mt19937_64 random(10);
  const std::vector<Payload> units = {with_signs(as_gaps({0}, 4), 1), unit};
  const Floats y = draw(kFamilies[0], kUnit + n, random);
  EXPECT_EQ(expect_the_cpus(decoder(), *codec, units, y, true), kRefused);
}

TEST(CudaThreshold, RefusesByEachRule) {
  expect_refused(with_signs(as_list({3, 9, 9}), 3), 50, "the same index twice");
  expect_refused(with_signs(as_list({9, 3}), 2), 50, "descending");
  expect_refused(with_signs(as_list({3, 50}), 2), 50, "an index beyond the unit");
  expect_refused(with_signs(as_list({0, 1, 2}), 3), 2, "more indices than elements");
  expect_refused(with_signs(as_gaps({3, 50}, 2), 2), 50, "gaps that leave the unit");
  expect_refused(with_signs(as_gaps({3, 4, 5}, 0), 3), 2, "more gaps than elements");
  expect_refused(with_signs(bytes_of({2 | 4 << 3, 3, 1}), 3), 16, "gaps that do not end");
  expect_refused(with_signs(bytes_of({3, 0x10, 0x20}), 2), 13, "a bit beyond the unit");
  expect_refused(bytes_of({6}), 13, "no layout");
  expect_refused(bytes_of({7}), 13, "no layout either");
  expect_refused(bytes_of({1 << 3}), 13, "low bits of nothing");
  expect_refused(bytes_of({0x80}), 13, "a set bit 7");
  for (const std::uint32_t tau : {0U, 0x7F800000U, 0x7FC00000U, 0x80000000U, 0xBF800000U}) {
    Payload unit = with_signs(as_list({3}), 1);
    std::memcpy(unit.data() + 4, &tau, sizeof tau);
    expect_refused(unit, 13, "tau");
  }
}

// Where a bitmap would take as many bytes as what it chose.
TEST(CudaThreshold, ChoosesTheLayoutThatTheCpuChooses) {
  std::mt19937_64 random(11);
  const auto codec = codec::make_codec("threshold:tau=0.5");
  for (int found = 0; found < 10;) {
    Floats x(2 + random() % 80), none;
    const std::uint64_t one_in = 2 + random() % 6;
    for (float& each : x) each = random() % one_in == 0 ? 1.0F : 0.0F;
    const auto count = static_cast<std::size_t>(std::ranges::count(x, 1.0F));
    const Payload unit = encode_on_cpu(*codec, x, {}, nullptr).units[0];
    const auto format = static_cast<codec::PositionFormat>(unit[0] & std::byte{7});
    const std::size_t positions =
        unit.size() - std::min<std::size_t>(count, 1) * 4 - (count + 7) / 8;
    if (format == codec::PositionFormat::kBitmap || positions != 1 + (x.size() + 7) / 8) continue;
    codec::CodecState codec_state;
    expect_call(*codec, x, none, codec_state, 0, /*prepares=*/false);
    ++found;
  }
}

TEST(CudaThreshold, OfNothingDoesNothing) {
  EXPECT_EQ(api().threshold_prepare(nullptr, {}, 0, 0.1, nullptr, stream()), 0);
  EXPECT_EQ(api().threshold_encode_spans(0, 0.1, nullptr, 0, {}, nullptr, stream()), 0);
  EXPECT_EQ(api().threshold_adapt(0, 0.1, nullptr, stream()), 0);
  EXPECT_EQ(
      api().threshold_decode_spans(nullptr, 0, {.payloads = {nullptr, 0, 1}}, nullptr, stream()),
      0);
  wait_for_device();
}

}  // namespace
}  // namespace gradwire::cuda
