// onebit on a GPU is the CPU's, bit for bit, unit by unit.
#include <gtest/gtest.h>

#include "cuda_kernels.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/blocks.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::cuda {
namespace {

using Floats = std::vector<float>;
using Payload = std::vector<std::byte>;

struct Encoded {
  std::vector<Payload> units;
  Floats error;
};

struct Decoded {
  Floats y;
  bool finite = true;
  bool refused = false;
};

// Blocks of one warp and of several, powers of two or not.
class CudaOneBit : public testing::TestWithParam<std::size_t> {
 protected:
  std::size_t block() const { return GetParam(); }
  std::size_t slot() const { return aligned(codec::OneBitKernels::most_bytes(block())); }
  std::size_t units(std::size_t n) const { return (n + block() - 1) / block(); }
  std::size_t length(std::size_t unit, std::size_t n) const {
    return std::min(block(), n - unit * block());
  }
  std::vector<std::size_t> lengths() const {
    if (block() > 2000) return {1, 1025, block() - 1, block(), 2 * block() + 7};
    if (block() == 32) return {0, 1, 31, 32, 33, 4500};  // the last: more than are launched at once
    return {0, 1, 2, 31, 33, block() - 1, block(), block() + 1, 5 * block() + 7};
  }
  std::size_t shift() { return random_() % 2; }
  // Few are enough of long ones.
  bool skips(std::size_t n) { return n > 1500 && random_() % (n / 750) > 0; }

  Encoded encode(const Floats& x, const float* residual) const {
    Encoded encoded{{}, Floats(x.size())};
    for (std::size_t i = 0; i < x.size(); i += block()) {
      const std::size_t n = std::min(block(), x.size() - i);
      Payload& payload = encoded.units.emplace_back(codec_->max_bytes(n));
      payload.resize(codec_->encode(x.data() + i, n,
                                    {.residual = residual == nullptr ? nullptr : residual + i,
                                     .error = encoded.error.data() + i},
                                    payload));
    }
    return encoded;
  }

  Decoded decode(const Payload& bytes, const Floats& before, bool add) const {
    Decoded decoded{before, true, false};
    try {
      const auto found = add ? codec_->decode_add(bytes, decoded.y.data(), before.size())
                             : codec_->decode(bytes, decoded.y.data(), before.size());
      decoded.finite = found.finite;
    } catch (const InvalidArgument&) {
      decoded.refused = true;
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (decoded.refused) decoded.y.assign(before.size(), nan);
    return decoded;
  }

  // With any bytes behind, up to the end of the slot.
  Payload extended(Payload unit) {
    const Payload more = draw_bytes(slot(), random_);
    unit.insert(unit.end(), more.begin(), more.end());
    unit.resize(slot());
    return unit;
  }
  SlotArray in_slots(std::vector<Payload> units) {
    SlotArray slots(units.size(), slot());
    for (Payload& each : units) each = extended(each);
    slots.set(units);
    return slots;
  }
  // y := payloads, or y + the one payload. Returns the flags.
  std::uint32_t decode(const SlotArray& slots, int count, float* y, std::size_t n, bool add) {
    const DeviceArray<std::uint32_t> flags({0});
    const cuda::GpuSpan run{.y = y, .n = n};
    const Decoding how{.payloads = slots.payloads(count), .adds = add};
    if (!add) {
      EXPECT_EQ(api().onebit_decode_spans(block(), &run, 1, how, nullptr, stream()), 0);
    }
    EXPECT_EQ(api().onebit_decode_spans(block(), &run, 1, how, flags.data(), stream()), 0);
    return flags.value();
  }

  std::shared_ptr<const codec::Codec> codec_ =
      codec::make_codec("onebit:block=" + std::to_string(GetParam()));
  codec::FloatEnvironment environment_;
  std::mt19937_64 random_{19};
};

TEST_P(CudaOneBit, EncodesAsTheCpu) {
  for (const Family& family : kFamilies)
    for (const std::size_t n : lengths())
      for (const bool fed_back : {false, true}) {
        if (skips(n)) continue;
        SCOPED_TRACE(std::string(family.name) + " n=" + std::to_string(n));
        const Floats x = draw(family, n, random_);
        const Floats e = draw(kFamilies[n % 2 == 0 ? 3 : 0], n, random_);
        const Encoded expected = encode(x, fed_back ? e.data() : nullptr);
        const DeviceArray<float> in(x, shift());
        const SlotArray slots(units(n), slot());
        const DeviceFeedback feedback(e, shift(), static_cast<std::uint32_t>(n % 2));
        cuda::GpuSpan run{.x = in.data(), .n = n};
        if (fed_back) run.span_feedback = feedback.span_feedback();
        RUN(api().onebit_encode_spans(block(), &run, 1, {.out = slots.data()}, nullptr, stream()));
        ASSERT_TRUE(slots.units() == expected.units);
        ASSERT_TRUE(same(in.values(), x));
        if (!fed_back) continue;
        ASSERT_TRUE(same(feedback.after(), expected.error));
        ASSERT_TRUE(same(feedback.before(), e));
      }
}

TEST_P(CudaOneBit, FinishesAsTheCpu) {
  for (const Family& family : kFamilies)
    for (const bool fed_back : {false, true}) {
      SCOPED_TRACE(family.name);
      if (skips(block())) continue;
      const std::size_t n = block() + 1 + random_() % block();
      const float factor = fed_back ? 1.0F / 3 : 1;
      const Floats x = draw(family, n, random_), e = draw(kFamilies[3], n, random_);
      const Encoded encoded = encode(x, fed_back ? e.data() : nullptr);
      Floats y;
      bool finite = true;
      for (std::size_t u = 0; u < encoded.units.size(); ++u) {
        const Decoded one = decode(encoded.units[u], Floats(length(u, n)), false);
        y.insert(y.end(), one.y.begin(), one.y.end());
        finite = finite && one.finite;
      }
      codec::kernels().scale[0](y.data(), static_cast<double>(factor), n);
      const DeviceArray<float> in(x, shift());  // in place
      const SlotArray slots(units(n), slot());
      const DeviceArray<std::uint32_t> flags({kRefused});
      const DeviceFeedback feedback(e, shift());
      cuda::GpuSpan run{.x = in.data(), .y = in.data(), .n = n};
      if (fed_back) run.span_feedback = feedback.span_feedback();
      RUN(api().onebit_encode_spans(block(), &run, 1,
                                    {.out = slots.data(), .finishes = true, .factor = factor},
                                    flags.data(), stream()));
      ASSERT_TRUE(slots.units() == encoded.units);
      ASSERT_TRUE(same(in.values(), y));
      ASSERT_EQ(flags.value(), finite ? kRefused : kRefused | kNotFinite);
      if (!fed_back) continue;
      ASSERT_TRUE(same(feedback.after(), encoded.error));
    }
}

TEST_P(CudaOneBit, AddsPayloadsAsTheCpu) {
  for (const std::size_t n : {std::size_t{1}, block() + 9, 2 * block(), 140 * block()})
    for (const std::size_t count : {1, 2, 3, 4, 5, 8, 9, 70}) {
      if (n > 3000 && (count > 9 || n > 20000)) continue;
      SCOPED_TRACE(std::to_string(count) + " of " + std::to_string(n));
      std::vector<Payload> cpu;
      SlotArray slots(units(n), slot(), count);
      // All without masks, or a few with, or all, or all of large values and Inf.
      const std::size_t kind = random_() % 4;
      for (std::size_t p = 0; p < count; ++p) {
        const std::size_t family[] = {0, p % 3 == 1 ? 12U : 0U, 9 + p % 5, p % 2 == 0 ? 6U : 14U};
        auto encoded = encode(draw(kFamilies[family[kind]], n, random_), nullptr);
        Payload& all = cpu.emplace_back();
        for (Payload& each : encoded.units) {
          all.insert(all.end(), each.begin(), each.end());
          each = extended(each);
        }
        slots.set(encoded.units, p);
      }
      const std::vector<ConstBytes> views(cpu.begin(), cpu.end());
      Floats expected(n);
      const bool finite = codec_->decode_sum(views, expected.data(), n).finite;
      const DeviceArray<float> y(Floats(n, 7.0F), shift());
      ASSERT_EQ(decode(slots, static_cast<int>(count), y.data(), n, false),
                finite ? 0U : kNotFinite);
      ASSERT_TRUE(same(y.values(), expected)) << "kind " << kind;
    }
}

TEST_P(CudaOneBit, DecodesAndAddsAsTheCpu) {
  for (const Family& family : kFamilies)
    for (const bool add : {false, true}) {
      SCOPED_TRACE(family.name);
      const std::size_t n = 1 + random_() % (block() + 40);
      const auto encoded = encode(draw(family, n, random_), nullptr);
      const Floats before = draw(kFamilies[random_() % std::size(kFamilies)], n, random_);
      Floats expected;
      bool finite = true;
      for (std::size_t u = 0; u < units(n); ++u) {
        const auto begin = before.begin() + static_cast<std::ptrdiff_t>(u * block());
        const Decoded one =
            decode(encoded.units[u],
                   Floats(begin, begin + static_cast<std::ptrdiff_t>(length(u, n))), add);
        expected.insert(expected.end(), one.y.begin(), one.y.end());
        finite = finite && one.finite;
      }
      const DeviceArray<float> y(before, shift());
      ASSERT_EQ(decode(in_slots(encoded.units), 1, y.data(), n, add), finite ? 0U : kNotFinite);
      ASSERT_TRUE(same(y.values(), expected));
    }
}

// Each unit stands for itself: what becomes of foreign bytes is what the CPU makes of them.
class CudaOneBitForeign : public CudaOneBit {
 protected:
  // All but the last of whole blocks; all bytes of a slot are there.
  void expect_decoded(std::vector<Payload> units, std::size_t last) {
    const std::size_t n = (units.size() - 1) * block() + last;
    const Floats before = draw(kFamilies[0], n, random_);
    for (Payload& each : units) each = extended(each);
    SlotArray slots(units.size(), slot());
    slots.set(units);
    for (const bool add : {false, true}) {
      Floats expected;
      std::uint32_t least = 0;  // of the flags: what is refused may or may not be finite
      bool any_refused = false;
      for (std::size_t u = 0; u < units.size(); ++u) {
        const auto begin = before.begin() + static_cast<std::ptrdiff_t>(u * block());
        const Floats here(begin, begin + static_cast<std::ptrdiff_t>(length(u, n)));
        const Decoded one = decode(units[u], here, add);
        expected.insert(expected.end(), one.y.begin(), one.y.end());
        any_refused = any_refused || one.refused;
        least |= one.refused ? kRefused : one.finite ? 0U : kNotFinite;
      }
      const DeviceArray<float> y(before, shift());
      const std::uint32_t found = CudaOneBit::decode(slots, 1, y.data(), n, add);
      ASSERT_TRUE(same(y.values(), expected));
      ASSERT_EQ(found & (any_refused ? least : 3U), least);
    }
  }

  Payload altered() {
    const std::size_t family = random_() % std::size(kFamilies);
    Payload payload = encode(draw(kFamilies[family], block(), random_), nullptr).units[0];
    if (random_() % 2 == 0) alter_means(payload);
    const bool front = random_() % 2 == 0;
    for (std::size_t changes = random_() % 4; changes > 0; --changes)
      payload[random_() % (front ? std::min<std::size_t>(14, payload.size()) : payload.size())] =
          static_cast<std::byte>(random_());
    return payload;
  }
  // To others of the same sign, so that mask and signs stay where they are.
  void alter_means(Payload& payload) {
    constexpr float kOthers[] = {0, kLeast, kMost, INFINITY, NAN};
    for (std::size_t at : {0, 4}) {
      float mean;
      std::memcpy(&mean, payload.data() + at, sizeof mean);
      mean = std::copysign(kOthers[random_() % std::size(kOthers)], mean);
      if (random_() % 2 == 0) std::memcpy(payload.data() + at, &mean, sizeof mean);
    }
  }

  // A payload of which the mask is runs of about so many bits, whether or not a bitmap is shorter.
  Payload of_runs(std::size_t bits) {
    std::vector<bool> code, mask;
    const auto add_run = [&](std::size_t length, bool set) {
      const auto digits = static_cast<std::size_t>(std::bit_width(length)) - 1;
      code.insert(code.end(), digits, false);
      code.push_back(true);
      for (std::size_t k = 0; k < digits; ++k) code.push_back((length >> k & 1) != 0);
      mask.insert(mask.end(), length, set);
    };
    bool set = false;
    for (; code.size() + 8 < bits && mask.size() + 4 < block(); set = !set)
      add_run(1 + random_() % 3, set);
    add_run(block() + 1 - mask.size(), set);
    const auto ones = static_cast<std::size_t>(std::count(mask.begin(), mask.end(), true));
    Payload payload(8 + (code.size() + 7) / 8);
    for (std::size_t i = 0; i < code.size(); ++i)
      if (code[i]) payload[8 + i / 8] |= static_cast<std::byte>(1U << i % 8);
    const float means[] = {-1.5F, 2.5F};
    std::memcpy(payload.data(), means, sizeof means);
    const Payload signs = draw_bytes((ones + 7) / 8, random_);
    payload.insert(payload.end(), signs.begin(), signs.end());
    return payload;
  }
};

// Up to those that take as many bytes as a bitmap, which is refused.
TEST_P(CudaOneBitForeign, RunsOfAnyLength) {
  std::vector<Payload> units;
  for (std::size_t u = 0; u < 48; ++u) units.push_back(of_runs(block() - std::min(block(), 2 * u)));
  for (std::size_t u = 0; u < 24; ++u) units.push_back(of_runs(block() - u % 8));
  expect_decoded(units, block());
}

TEST_P(CudaOneBitForeign, RandomBytes) {
  std::vector<Payload> units;
  for (std::size_t u = 0; u < std::min<std::size_t>(80, 120000 / block()); ++u) {
    units.push_back(draw_bytes(slot(), random_));
    if (u % 3 > 0)  // with a mask of either kind
      units.back()[3] |= std::byte{0x80}, units.back()[7] = std::byte(u % 2 == 0 ? 0x80 : 0);
  }
  expect_decoded(units, 1 + random_() % block());
}

TEST_P(CudaOneBitForeign, AlteredPayloads) {
  std::vector<Payload> units;
  for (std::size_t u = 0; u < std::min<std::size_t>(120, 160000 / block()); ++u)
    units.push_back(altered());
  expect_decoded(units, block());
}

TEST_P(CudaOneBitForeign, OtherBytesBehindACut) {
  for (const std::size_t family : {0, 11, 12, 13}) {
    const Payload payload = encode(draw(kFamilies[family], block(), random_), nullptr).units[0];
    std::vector<Payload> units;
    const std::size_t step = 1 + payload.size() * block() / 80000;
    for (std::size_t size = 0; size <= payload.size(); size += step)
      units.emplace_back(payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(size));
    expect_decoded(units, block());
  }
}

TEST_P(CudaOneBit, NothingIsEmpty) {
  const cuda::GpuSpan none{};
  RUN(api().onebit_encode_spans(block(), &none, 1, {}, nullptr, stream()));
  RUN(api().onebit_decode_spans(block(), &none, 1, {.payloads = {nullptr, 0, 1}}, nullptr,
                                stream()));
}

const auto kBlocks = testing::Values(32, 96, 1024, 1056, 2048, 8192);
const auto name_of_block = [](const auto& each) { return "of" + std::to_string(each.param); };
INSTANTIATE_TEST_SUITE_P(Blocks, CudaOneBit, kBlocks, name_of_block);
INSTANTIATE_TEST_SUITE_P(Blocks, CudaOneBitForeign, kBlocks, name_of_block);

}  // namespace
}  // namespace gradwire::cuda
