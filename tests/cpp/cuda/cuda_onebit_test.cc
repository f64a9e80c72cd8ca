// onebit on a GPU is the CPU's, bit for bit, unit by unit.
#include <gtest/gtest.h>

#include <optional>

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

  // One unit; `whole`: all of the bytes have to be its.
  Decoded decode(const Payload& bytes, const Floats& before, bool add, bool whole) const {
    Decoded decoded{before, true, false};
    try {
      const auto found = add ? codec_->decode_add(bytes, decoded.y.data(), before.size())
                             : codec_->decode(bytes, decoded.y.data(), before.size());
      decoded.finite = found.finite;
      decoded.refused = whole && found.bytes < bytes.size();
    } catch (const InvalidArgument&) {
      decoded.refused = true;
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (decoded.refused) decoded.y.assign(before.size(), nan);
    return decoded;
  }

  Payload slots_of(const std::vector<Payload>& units) {
    Payload all = draw_bytes(units.size() * slot(), random_);
    for (std::size_t u = 0; u < units.size(); ++u)
      std::copy(units[u].begin(), units[u].end(),
                all.begin() + static_cast<std::ptrdiff_t>(u * slot()));
    return all;
  }

  void expect_units(const Payload& slots, const std::vector<std::uint32_t>& sizes,
                    const std::vector<Payload>& expected) const {
    for (std::size_t u = 0; u < expected.size(); ++u) {
      ASSERT_EQ(sizes[u], expected[u].size()) << "unit " << u;
      const auto begin = slots.begin() + static_cast<std::ptrdiff_t>(u * slot());
      ASSERT_TRUE(same(Payload(begin, begin + sizes[u]), expected[u])) << "unit " << u;
    }
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
        const DeviceArray<std::byte> out(draw_bytes(units(n) * slot(), random_), 0);
        const DeviceArray<std::uint32_t> sizes(std::vector<std::uint32_t>(units(n), 1));
        const DeviceFeedback feedback(e, shift(), static_cast<std::uint32_t>(n % 2));
        const RunFeedback run_feedback = fed_back ? feedback.run_feedback() : RunFeedback{};
        RUN(api().onebit_encode(in.data(), run_feedback, n, block(), out.data(), sizes.data(),
                                stream()));
        expect_units(out.values(), sizes.values(), expected.units);
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
        const Decoded one = decode(encoded.units[u], Floats(length(u, n)), false, true);
        y.insert(y.end(), one.y.begin(), one.y.end());
        finite = finite && one.finite;
      }
      codec::kernels().scale[0](y.data(), static_cast<double>(factor), n);
      const DeviceArray<float> in(x, shift());  // in place
      const DeviceArray<std::byte> out(Payload(units(n) * slot()), 0);
      const DeviceArray<std::uint32_t> sizes(std::vector<std::uint32_t>(units(n)));
      const DeviceArray<std::uint32_t> flags({kRefused});
      const DeviceFeedback feedback(e, shift());
      RUN(api().onebit_finish(in.data(), fed_back ? feedback.run_feedback() : RunFeedback{}, n,
                              block(), out.data(), sizes.data(), in.data(), factor, flags.data(),
                              stream()));
      expect_units(out.values(), sizes.values(), encoded.units);
      ASSERT_TRUE(same(in.values(), y));
      ASSERT_EQ(flags.value(), finite ? kRefused : kRefused | kNotFinite);
      if (!fed_back) continue;
      ASSERT_TRUE(same(feedback.after(), encoded.error));
    }
}

TEST_P(CudaOneBit, PacksToTheCpusBytes) {
  const std::size_t n = 3 * block() + 17;
  for (const std::size_t family : {0, 12}) {
    const Floats x = draw(kFamilies[family], n, random_);
    Payload expected(codec_->max_bytes(n));
    expected.resize(codec_->encode(x.data(), n, {}, expected));
    const DeviceArray<float> in(x, 0);
    const DeviceArray<std::byte> slots(Payload(units(n) * slot()), 0);
    const DeviceArray<std::byte> out(Payload(expected.size()), 0);
    const DeviceArray<std::uint32_t> sizes(std::vector<std::uint32_t>(units(n)));
    const DeviceArray<std::uint64_t> offsets(std::vector<std::uint64_t>(units(n) + 1));
    RUN(api().onebit_encode(in.data(), {}, n, block(), slots.data(), sizes.data(), stream()));
    RUN(api().pack(slots.data(), slot(), sizes.data(), units(n), offsets.data(), out.data(),
                   stream()));
    ASSERT_TRUE(same(out.values(), expected));
  }
}

TEST_P(CudaOneBit, SizesMayBeMissing) {
  const Floats x = draw(kFamilies[10], block(), random_);
  const DeviceArray<float> in(x);
  const DeviceArray<std::byte> out(Payload(slot()), 0);
  RUN(api().onebit_encode(in.data(), {}, block(), block(), out.data(), nullptr, stream()));
  const auto expected = encode(x, nullptr).units;
  expect_units(out.values(), {static_cast<std::uint32_t>(expected[0].size())}, expected);
}

// A payload on the device, in slots; or packed, at any address.
struct OnDevicePayload {
  DeviceArray<std::byte> bytes;
  std::optional<DeviceArray<std::uint64_t>> offsets;

  Slots slots() const { return {bytes.data(), offsets ? offsets->data() : nullptr}; }
};

OnDevicePayload in_slots(const Payload& slots) {
  return {DeviceArray<std::byte>(slots, 0), std::nullopt};
}

OnDevicePayload packed(const std::vector<Payload>& units, std::size_t shift) {
  Payload all;
  std::vector<std::uint64_t> offsets = {0};
  for (const Payload& each : units) {
    all.insert(all.end(), each.begin(), each.end());
    offsets.push_back(all.size());
  }
  return {DeviceArray<std::byte>(all, shift), DeviceArray<std::uint64_t>(offsets)};
}

TEST_P(CudaOneBit, AddsPayloadsAsTheCpu) {
  for (const std::size_t n : {std::size_t{1}, block() + 9, 2 * block(), 140 * block()})
    for (const std::size_t count : {1, 2, 3, 4, 5, 8, 9, 70}) {
      if (n > 3000 && (count > 9 || n > 20000)) continue;
      SCOPED_TRACE(std::to_string(count) + " of " + std::to_string(n));
      std::vector<Payload> cpu;
      std::vector<OnDevicePayload> payloads;
      std::vector<Slots> slots;
      // All without masks, or a few with, or all, or all of large values and Inf.
      const std::size_t kind = random_() % 4;
      for (std::size_t p = 0; p < count; ++p) {
        const std::size_t family[] = {0, p % 3 == 1 ? 12U : 0U, 9 + p % 5, p % 2 == 0 ? 6U : 14U};
        const auto encoded = encode(draw(kFamilies[family[kind]], n, random_), nullptr);
        Payload& all = cpu.emplace_back();
        for (const Payload& each : encoded.units) all.insert(all.end(), each.begin(), each.end());
        payloads.push_back(random_() % 2 == 0 ? packed(encoded.units, random_() % 5)
                                              : in_slots(slots_of(encoded.units)));
      }
      for (const auto& each : payloads) slots.push_back(each.slots());
      const std::vector<ConstBytes> views(cpu.begin(), cpu.end());
      Floats expected(n);
      const bool finite = codec_->decode_sum(views, expected.data(), n).finite;
      const DeviceArray<float> y(Floats(n, 7.0F), shift());
      const DeviceArray<std::uint32_t> flags({0});
      RUN(api().onebit_sum(slots.data(), static_cast<int>(count), n, block(), y.data(), false,
                           flags.data(), stream()));
      std::fill(slots.begin(), slots.end(), Slots{});  // it is the caller's again
      ASSERT_TRUE(same(y.values(), expected)) << "kind " << kind;
      ASSERT_EQ(flags.value(), finite ? 0U : kNotFinite);
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
                   Floats(begin, begin + static_cast<std::ptrdiff_t>(length(u, n))), add, true);
        expected.insert(expected.end(), one.y.begin(), one.y.end());
        finite = finite && one.finite;
      }
      const auto payload = packed(encoded.units, 1);
      const Slots slots = payload.slots();
      const DeviceArray<float> y(before, shift());
      const DeviceArray<std::uint32_t> flags({0});
      RUN(api().onebit_sum(&slots, 1, n, block(), y.data(), add, flags.data(), stream()));
      ASSERT_TRUE(same(y.values(), expected));
      ASSERT_EQ(flags.value(), finite ? 0U : kNotFinite);
      RUN(api().onebit_sum(&slots, 1, n, block(), y.data(), add, nullptr, stream()));
    }
}

// Each unit stands for itself: what becomes of foreign bytes is what the CPU makes of them.
class CudaOneBitForeign : public CudaOneBit {
 protected:
  // All but the last of whole blocks. In slots all bytes of a slot are there.
  void expect_decoded(std::vector<Payload> units, std::size_t last, bool slotted) {
    const std::size_t n = (units.size() - 1) * block() + last;
    const Floats before = draw(kFamilies[0], n, random_);
    const Payload all = slots_of(units);
    for (std::size_t u = 0; slotted && u < units.size(); ++u) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(u * slot());
      units[u].assign(begin, begin + static_cast<std::ptrdiff_t>(slot()));
    }
    const auto payload = slotted ? in_slots(all) : packed(units, random_() % 5);
    const Slots slots = payload.slots();
    for (const bool add : {false, true}) {
      Floats expected;
      std::uint32_t least = 0;  // of the flags: what is refused may or may not be finite
      bool any_refused = false;
      for (std::size_t u = 0; u < units.size(); ++u) {
        const auto begin = before.begin() + static_cast<std::ptrdiff_t>(u * block());
        const Floats here(begin, begin + static_cast<std::ptrdiff_t>(length(u, n)));
        const Decoded one = decode(units[u], here, add, !slotted);
        expected.insert(expected.end(), one.y.begin(), one.y.end());
        any_refused = any_refused || one.refused;
        least |= one.refused ? kRefused : one.finite ? 0U : kNotFinite;
      }
      const DeviceArray<float> y(before, shift());
      const DeviceArray<std::uint32_t> flags({0});
      RUN(api().onebit_sum(&slots, 1, n, block(), y.data(), add, flags.data(), stream()));
      ASSERT_TRUE(same(y.values(), expected));
      ASSERT_EQ(flags.value() & (any_refused ? least : 3U), least);
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
  expect_decoded(units, block(), false);
}

TEST_P(CudaOneBitForeign, RandomBytes) {
  for (const bool slotted : {false, true}) {
    std::vector<Payload> units;
    for (std::size_t u = 0; u < std::min<std::size_t>(40, 60000 / block()); ++u) {
      units.push_back(draw_bytes(slotted ? slot() : random_() % (slot() + 1), random_));
      if (u % 3 > 0 && units.back().size() > 8)  // with a mask of either kind
        units.back()[3] |= std::byte{0x80}, units.back()[7] = std::byte(u % 2 == 0 ? 0x80 : 0);
    }
    expect_decoded(units, 1 + random_() % block(), slotted);
  }
}

TEST_P(CudaOneBitForeign, AlteredPayloads) {
  for (const bool slotted : {false, true}) {
    std::vector<Payload> units;
    for (std::size_t u = 0; u < std::min<std::size_t>(60, 80000 / block()); ++u)
      units.push_back(altered());
    expect_decoded(units, block(), slotted);
  }
}

TEST_P(CudaOneBitForeign, EveryTruncation) {
  for (const std::size_t family : {0, 11, 12, 13}) {
    const Payload payload = encode(draw(kFamilies[family], block(), random_), nullptr).units[0];
    std::vector<Payload> units;
    const std::size_t step = 1 + payload.size() * block() / 80000;
    for (std::size_t size = 0; size <= payload.size(); size += step)
      units.emplace_back(payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(size));
    units.push_back(payload);
    units.push_back(payload);
    units.back().push_back(std::byte{0});
    expect_decoded(units, block(), false);
  }
}

TEST_P(CudaOneBitForeign, RefusedOffsetsRefuseAll) {
  const DeviceArray<std::byte> bytes(Payload(100));
  const DeviceArray<std::uint64_t> offsets(std::vector<std::uint64_t>(3));
  const DeviceArray<float> y(Floats(2 * block(), 1.0F));
  const DeviceArray<std::uint32_t> flags({0});
  const Slots slots{bytes.data(), offsets.data()};
  RUN(api().onebit_sum(&slots, 1, 2 * block(), block(), y.data(), true, flags.data(), stream()));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(same(y.values(), Floats(2 * block(), nan)));
  EXPECT_EQ(flags.value(), kRefused);
}

TEST_P(CudaOneBit, NothingIsEmpty) {
  const Slots none{};
  RUN(api().onebit_encode(nullptr, {}, 0, block(), nullptr, nullptr, stream()));
  RUN(api().onebit_finish(nullptr, {}, 0, block(), nullptr, nullptr, nullptr, 1, nullptr,
                          stream()));
  RUN(api().onebit_sum(&none, 1, 0, block(), nullptr, true, nullptr, stream()));
}

const auto kBlocks = testing::Values(32, 96, 1024, 1056, 2048, 8192);
const auto name_of_block = [](const auto& each) { return "of" + std::to_string(each.param); };
INSTANTIATE_TEST_SUITE_P(Blocks, CudaOneBit, kBlocks, name_of_block);
INSTANTIATE_TEST_SUITE_P(Blocks, CudaOneBitForeign, kBlocks, name_of_block);

}  // namespace
}  // namespace gradwire::cuda
