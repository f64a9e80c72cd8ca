// What tests of threshold and topk on the device share: payloads of the CPU's codec, unit by unit,
// and hostile ones.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda_kernels.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/sparse.h"

namespace gradwire::cuda {

using Floats = std::vector<float>;
using Payload = std::vector<std::byte>;

inline constexpr std::size_t kUnit = codec::kSparseBlock;

// All NaNs are one.
inline std::vector<std::uint32_t> bits(const Floats& values) {
  std::vector<std::uint32_t> all;
  for (float each : values)
    all.push_back(std::isnan(each) ? 0x7FC00000U : std::bit_cast<std::uint32_t>(each));
  return all;
}

// ---- encode ------------------------------------------------------------------------------------

struct Encoded {
  std::vector<Payload> units;
  Floats error;
};

// residual: may be empty.
inline Encoded encode_on_cpu(const codec::Codec& codec, const Floats& x, const Floats& residual,
                             codec::CodecState* codec_state) {
  const codec::FloatEnvironment environment;
  Encoded sent{{}, Floats(x.size())};
  for (std::size_t i = 0; i < x.size(); i += kUnit) {
    const std::size_t n = std::min(kUnit, x.size() - i);
    codec::EncodeContext span_feedback{
        .element = i, .error = sent.error.data() + i, .codec_state = codec_state};
    if (!residual.empty()) span_feedback.residual = residual.data() + i;
    Payload unit(codec.max_bytes(n));
    unit.resize(codec.encode(x.data() + i, n, span_feedback, unit));
    sent.units.push_back(unit);
  }
  return sent;
}

// A key: which of the two places of e is the old one, and what it adapts to.
struct Key {
  Key(const Floats& residual, std::uint32_t which, const GpuCodecState& codec_state)
      : e(residual, 3),
        next(Floats(residual.size(), -7), 2),
        key_state(key_state_of(which, codec_state), 0) {
    SpanFeedback feedback{{next.data(), next.data()}, key_state.data()};
    feedback.residual[which] = e.data();
    if (!residual.empty()) span_feedback = feedback;
  }

  static std::vector<GpuKeyState> key_state_of(std::uint32_t which,
                                               const GpuCodecState& codec_state) {
    GpuKeyState one{which, which, 0, {}};
    one.codec_state[1 - which] = codec_state;
    return {one};
  }
  GpuCodecState codec_state() const {
    const GpuKeyState now = key_state.values()[0];
    return now.codec_state[1 - now.which];
  }

  DeviceArray<float> e, next;
  DeviceArray<GpuKeyState> key_state;
  SpanFeedback span_feedback{{nullptr, nullptr}, key_state.data()};
};

// ---- decode ------------------------------------------------------------------------------------

struct DecodedArray {
  Floats y;
  std::uint32_t flags;
};

// What the CPU makes of one unit; kRefused: it throws.
inline DecodedArray decode_on_cpu(const codec::Codec& codec, const Payload& unit, Floats y,
                                  bool add) {
  const codec::FloatEnvironment environment;
  try {
    const codec::Decoded decoded =
        add ? codec.decode_add(unit, y.data(), y.size()) : codec.decode(unit, y.data(), y.size());
    return {y, decoded.finite ? 0U : kNotFinite};
  } catch (const InvalidArgument&) {
  }
  return {Floats(y.size(), NAN), kRefused};
}

// The device's decoder of a codec, of one run.
using Decode = std::function<Status(const cuda::GpuSpan&, const Decoding&, std::uint32_t* flags)>;

inline DecodedArray decode_slots(const Decode& decode, const SlotArray& slots, const Floats& y,
                                 bool add) {
  const DeviceArray<float> on_device(y, 3);
  const DeviceArray<std::uint32_t> flags({0});
  const cuda::GpuSpan run{.y = on_device.data(), .n = y.size()};
  EXPECT_EQ(decode(run, {.payloads = slots.payloads(), .adds = add}, flags.data()), 0);
  return {on_device.values(), flags.values()[0]};
}

// Compares all units with what the CPU decodes of each; it finds all bytes of a slot, too.
inline void expect_decoded(const DecodedArray& actual, const codec::Codec& codec,
                           const std::vector<Payload>& units, const Floats& y, bool add) {
  DecodedArray expected{{}, 0};
  for (std::size_t u = 0; u < units.size(); ++u) {
    const auto first = y.begin() + static_cast<std::ptrdiff_t>(u * kUnit);
    const auto n = static_cast<std::ptrdiff_t>(std::min(kUnit, y.size() - u * kUnit));
    const DecodedArray one = decode_on_cpu(codec, units[u], Floats(first, first + n), add);
    expected.y.insert(expected.y.end(), one.y.begin(), one.y.end());
    expected.flags |= one.flags;
  }
  EXPECT_EQ(actual.flags, expected.flags);
  EXPECT_TRUE(bits(actual.y) == bits(expected.y));
}

// Decodes foreign units on both sides. Returns the flags.
inline std::uint32_t expect_the_cpus(const Decode& decode, const codec::Codec& codec,
                                     std::vector<Payload> units, const Floats& y, bool add) {
  SlotArray slots(units.size(), aligned(codec.max_bytes(kUnit)));
  slots.set(units);
  for (Payload& each : units) each = slots.padded(each);
  const DecodedArray decoded = decode_slots(decode, slots, y, add);
  expect_decoded(decoded, codec, units, y, add);
  return decoded.flags;
}

// Payloads as nobody writes them, of n elements each.
inline std::vector<Payload> hostile_units(const codec::Codec& codec, std::size_t count,
                                          std::size_t n, std::mt19937_64& random) {
  std::vector<Payload> all;
  while (all.size() < count) {
    Payload unit;
    if (random() % 4 == 0) {
      unit.resize(random() % (codec.max_bytes(n) + 9));
      for (std::byte& each : unit) each = static_cast<std::byte>(random());
      if (!unit.empty()) unit[0] &= std::byte{0x7F};
    } else {
      const Floats x = draw(kFamilies[random() % std::size(kFamilies)], n, random);
      unit = encode_on_cpu(codec, x, {}, nullptr).units[0];
      for (std::size_t changes = random() % 3; changes > 0; --changes)
        unit[random() %
             (random() % 2 == 0 ? unit.size() : std::min<std::size_t>(12, unit.size()))] =
            static_cast<std::byte>(random());
      if (random() % 4 == 0) unit.resize(unit.size() - 1 + random() % 3);
    }
    all.push_back(unit);
  }
  return all;
}

// A unit of positions that the CPU's encoder would have written in another layout: every layout,
// some `low` of gaps; with the values behind it.
inline Payload as_list(const std::vector<std::uint16_t>& index) {
  const auto low = static_cast<std::byte>(index.size() % 128);
  Payload out = {static_cast<std::byte>(codec::PositionFormat::kList), low};
  if (index.size() >= 128) {
    out[1] |= std::byte{128};
    out.push_back(static_cast<std::byte>(index.size() / 128));
  }
  for (const std::uint16_t i : index) {
    out.push_back(static_cast<std::byte>(i & 0xFF));
    out.push_back(static_cast<std::byte>(i >> 8));
  }
  return out;
}

inline Payload as_gaps(const std::vector<std::uint16_t>& index, unsigned low) {
  Payload out = as_list(index);
  out.resize(index.size() < 128 ? 2 : 3);
  out[0] = static_cast<std::byte>(static_cast<unsigned>(codec::PositionFormat::kGaps) | low << 3);
  std::vector<bool> all;
  std::size_t next = 0;
  for (const std::uint16_t i : index) {
    all.insert(all.end(), (i - next) >> low, false);
    all.push_back(true);
    for (unsigned bit = 0; bit < low; ++bit) all.push_back(((i - next) >> bit & 1) != 0);
    next = i + std::size_t{1};
  }
  for (std::size_t bit = 0; bit < all.size(); ++bit) {
    if (bit % 8 == 0) out.push_back(std::byte{0});
    if (all[bit]) out.back() |= std::byte{1} << (bit % 8);
  }
  return out;
}

// Ascending.
inline std::vector<std::uint16_t> draw_index(std::size_t count, std::size_t n,
                                             std::mt19937_64& random) {
  std::vector<std::uint16_t> all(n);
  for (std::size_t i = 0; i < n; ++i) all[i] = static_cast<std::uint16_t>(i);
  std::ranges::shuffle(all, random);
  all.resize(count);
  std::ranges::sort(all);
  return all;
}

}  // namespace gradwire::cuda
