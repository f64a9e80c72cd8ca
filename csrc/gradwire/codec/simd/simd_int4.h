// int4 (codec/int4.cc defines it): per unit the scales of its blocks, then half a byte an element.
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/codec/simd/simd_group.h"
#include "gradwire/codec/simd/simd_onebit_sum.h"
#include "gradwire/codec/simd/simd_rounding.h"
#include "gradwire/codec/simd/simd_rules.h"

namespace gradwire::codec {
namespace {

// The first or the second sixteen elements of a group.
struct HalfGroup {
  U32 part[kParts / 2];
};

// Each simd_<isa>.cc defines these: pack_half() writes the last byte of each lane, unpack_bytes()
// reads unsigned bytes, pick() returns the value that the last four bits of each lane number.
void pack_half(const HalfGroup& lanes, std::byte* to);
U32 unpack_bytes(const std::byte* from);
F32 pick(const SixteenValues& values, U32 lanes);
U32 larger(U32 a, U32 b);

namespace int4 {

constexpr std::size_t kUnit = Int4Kernels::kUnit;
constexpr std::size_t kBlocks = kUnit / kGroup;  // of a unit, at most
constexpr std::size_t kHalf = kGroup / 2;        // bytes of a group's codes

constexpr std::size_t bytes_of_codes(All) { return kHalf; }
constexpr std::size_t bytes_of_codes(std::size_t count) { return count < kHalf ? count : kHalf; }

// What the elements of each group of a unit are multiplied by. Both are 0 in a block that is too
// small, and the scale is NaN in one that is not finite.
struct Scales {
  alignas(64) float scale[kBlocks];
  alignas(64) float inverse[kBlocks];
  alignas(64) std::uint16_t sent[kBlocks];
  bool finite;

  // Writes those of `count` blocks of so many groups each.
  void put_blocks(std::size_t count, std::size_t each, std::byte* out) const {
    if (each == 1 && count == kBlocks) {
      __builtin_memcpy(out, sent, sizeof sent);
      return;
    }
    for (std::size_t i = 0; i < count; ++i) put(out + i * Int4Kernels::kScaleBytes, sent[i * each]);
  }
};

// Returns a number for each value that is the larger the larger its magnitude is; the last bit is
// the sign.
U32 key_of(F32 v) { return (bits<U32>(v) << 1) | (bits<U32>(v) >> 31); }

template <std::size_t kFirst, typename V, std::size_t... lane>
V every_other(V a, V b, std::index_sequence<lane...>) {
  return __builtin_shufflevector(a, b, (2 * lane + kFirst)...);
}
// Returns, in lane i, the largest of all lanes of vector i.
template <std::size_t kCount>
U32 largest_of_each(const U32* of) {
  if constexpr (kCount == 1) {
    return of[0];
  } else {
    const auto lanes = std::make_index_sequence<kLanes>();
    const U32 a = largest_of_each<kCount / 2>(of), b = largest_of_each<kCount / 2>(of + kCount / 2);
    return larger(every_other<0>(a, b, lanes), every_other<1>(a, b, lanes));
  }
}

// The largest key of each group of a unit, and then of the block in which it is.
struct Keys {
  U32 in_lanes[kBlocks];
  alignas(64) std::uint32_t of[kBlocks];

  void join(std::size_t groups) {
    for (std::size_t i = 0; i < kBlocks; i += kLanes)
      put(reinterpret_cast<std::byte*>(of + i), largest_of_each<kLanes>(in_lanes + i));
    if (groups > 1) join_groups(groups);
  }
  void join_groups(std::size_t each) {
    for (std::size_t i = 0; i < kBlocks; i += each) {
      std::uint32_t most = 0;
      for (std::size_t k = i; k < i + each; ++k) most = of[k] > most ? of[k] : most;
      for (std::size_t k = i; k < i + each; ++k) of[k] = most;
    }
  }
};

constexpr auto kMostBits = __builtin_bit_cast(std::int32_t, Int4Kernels::kMostScale);
constexpr auto kLeastBits =
    __builtin_bit_cast(std::int32_t, 0x1p-100F);  // of a scale that is not 0

I32 limited_scale(I32 scale) { return scale > kMostBits ? (I32{} | kMostBits) : scale; }

// A rounding says what a block's scale is, without limits, and returns kRounder + q for v, the
// elements from `i` on of a block. `most`: bits of the block's largest magnitude.
struct Int4ToNearest {
  static constexpr auto& kLevels = Int4Kernels::kNearest;
  static constexpr float kOverScale = 1;  // inverse · scale

  explicit Int4ToNearest(const RandomPosition*) {}
  void start_unit(std::size_t) {}

  static I32 scale(I32 most) {
    const U32 exact = bits<U32>(most);
    return bits<I32>((exact + 0x7FFFU + ((exact >> 16) & 1U)) & 0xFFFF0000U);
  }
  static U32 sign(U32 key) { return key << 31; }

  F32 operator()(F32 t, std::size_t) const {
    // 4 · |t| is exact, so that a fused multiply-add has the same bits.
    const F32 magnitude = bits<F32>(magnitude_of(t));
    F32 slope;
    if constexpr (kLanes > 1)
      slope = fused(F32{} - 4.0F, magnitude, F32{} + 12.0F);
    else
      slope = 12.0F - 4.0F * magnitude;
    const I32 least = bits<I32>(F32{} + (kRounder - 7.0F));
    return bits<F32>(larger(bits<I32>(t * slope + kRounder), least));
  }
};

class Int4AtRandom {
 public:
  static constexpr auto& kLevels = Int4Kernels::kEqual;
  static constexpr float kOverScale = 7;

  explicit Int4AtRandom(const RandomPosition* position) : random_(position) {}
  void start_unit(std::size_t begin) { random_.start_block(begin); }

  static I32 scale(I32 most) { return bits<I32>((bits<U32>(most) + 0xFFFFU) & 0xFFFF0000U); }
  static U32 sign(U32) { return U32{}; }

  F32 operator()(F32 t, std::size_t i) const { return random_(t, i); }

 private:
  AtRandom<7> random_;
};

template <typename Round>
void choose_scales(const Keys& keys, Scales& scales) {
  I32 largest_of_all{};
  for (std::size_t i = 0; i < kBlocks; i += kLanes) {
    const U32 key = get<U32>(reinterpret_cast<const std::byte*>(keys.of + i));
    const I32 most = bits<I32>(key >> 1);
    largest_of_all = larger(largest_of_all, most);
    I32 chosen = limited_scale(Round::scale(most)) | bits<I32>(Round::sign(key));
    chosen = most < kLeastBits ? I32{} : chosen;
    F32 inverse = Round::kOverScale / bits<F32>(chosen);
    inverse = most < kLeastBits ? F32{} : inverse;
    chosen = most < kInfinity ? chosen : bits<I32>(nan<float>());
    put(reinterpret_cast<std::byte*>(scales.sent + i), narrow(bits<U32>(chosen) >> 16));
    put(reinterpret_cast<std::byte*>(scales.scale + i), chosen);
    put(reinterpret_cast<std::byte*>(scales.inverse + i), inverse);
  }
  scales.finite = largest(largest_of_all) < kInfinity;
}

// What each code stands for, in a block with this scale.
SixteenValues values_of(const Int4Kernels::Levels& levels, float scale) {
  SixteenValues values;
  each_of<16 / kLanes>([&](std::size_t k) {
    values.part[k] =
        get<F32>(reinterpret_cast<const std::byte*>(&levels) + k * sizeof(F32)) * scale;
  });
  return values;
}

void store_codes(std::byte* to, All, const HalfGroup& pairs) { pack_half(pairs, to); }
void store_codes(std::byte* to, std::size_t count, const HalfGroup& pairs) {
  std::byte packed[kHalf];
  pack_half(pairs, packed);
  __builtin_memcpy(to, packed, bytes_of_codes(count));
}

// A unit. Its first pass finds the largest keys of its groups and leaves v in `error` where that
// differs from x; its second pass writes codes and errors. The second pass of a unit and the first
// of the next one are one loop, as in int8.
template <bool kResidual, bool kError>
struct Unit {
  static constexpr bool kStored = kResidual && kError;

  GroupSource<kResidual> source;
  float* error;
  std::size_t n;

  template <typename PartOf>
  void look_at(std::size_t i, PartOf part, Keys& keys) const {
    const Group v = source(i, part);
    if constexpr (kStored) store<Groups>(error, i, part, v);
    U32 most = key_of(v[0]);
    each_of<kParts - 1>([&](std::size_t k) { most = larger(most, key_of(v[k + 1])); });
    keys.in_lanes[i / kGroup] = most;
  }
  void look(Keys& keys) const {
    if (n < kUnit) keys = {};
    sweep<kGroup>(n, [&](std::size_t i, auto part) { look_at(i, part, keys); });
  }

  template <typename PartOf>
  Group value(std::size_t i, PartOf part) const {
    if constexpr (kStored)
      return load<Groups>(error, i, part);
    else
      return source(i, part);
  }

  template <typename PartOf, typename Round>
  void write_group(std::size_t i, PartOf part, const Round& round, const Scales& scales,
                   std::byte* codes) const {
    const float inverse = scales.inverse[i / kGroup];
    const SixteenValues values = values_of(Round::kLevels, scales.scale[i / kGroup]);
    Group v = value(i, part);
    Parts<U32> code;
    each_part([&](std::size_t k) {
      const F32 rounded = round(v[k] * inverse, i + k * kLanes);
      code[k] = bits<U32>(rounded);
      v[k] = v[k] - pick(values, code[k]);
    });
    HalfGroup pairs;
    each_of<kParts / 2>(
        [&](std::size_t k) { pairs.part[k] = (code[k] & 0xFU) | (code[k + kParts / 2] << 4); });
    store_codes(codes + i / 2, part, pairs);
    if constexpr (kError) store<Groups>(error, i, part, v);
  }

  template <typename Round>
  void write(const Round& round, const Scales& scales, std::byte* codes) const {
    sweep<kGroup>(n, [&](std::size_t i, auto part) { write_group(i, part, round, scales, codes); });
  }
  // Also does what look() of the next unit would do; both must be whole.
  template <typename Round>
  void write_and_look(const Round& round, const Scales& scales, std::byte* codes, const Unit& next,
                      Keys& keys) const {
    for (std::size_t i = 0; i < kUnit; i += kGroup) {
      next.look_at(i, All{}, keys);
      next.source.ask_for(i + kUnit);
      write_group(i, All{}, round, scales, codes);
    }
  }

  // What write() leaves in groups that are not finite becomes 0.
  void give_up(const Scales& scales, std::byte* codes) const {
    sweep<kGroup>(n, [&](std::size_t i, auto part) {
      const float scale = scales.scale[i / kGroup];
      if (scale == scale) return;
      __builtin_memset(codes + i / 2, 0, bytes_of_codes(part));
      if constexpr (kError) store<Groups>(error, i, part, Group{});
    });
  }
};

template <bool kResidual, bool kError, typename Round>
[[gnu::flatten]] void encode_as(const float* x, const float* residual, std::size_t n,
                                std::size_t block, Round round, std::byte* out,
                                float* error) noexcept {
  const auto unit_at = [=](std::size_t i) {
    return Unit<kResidual, kError>{{x + i, kResidual ? residual + i : nullptr},
                                   kError ? error + i : nullptr,
                                   n - i < kUnit ? n - i : kUnit};
  };
  Keys keys;
  Scales scales;
  auto here = unit_at(0);
  here.look(keys);
  for (std::size_t i = 0; i < n;) {
    keys.join(block / kGroup);
    choose_scales<Round>(keys, scales);
    const std::size_t blocks = (here.n + block - 1) / block;
    scales.put_blocks(blocks, block / kGroup, out);
    std::byte* const codes = out + blocks * Int4Kernels::kScaleBytes;
    round.start_unit(i);
    i += here.n;
    const auto next = unit_at(i);
    if (next.n == kUnit) {
      here.write_and_look(round, scales, codes, next, keys);
    } else {
      here.write(round, scales, codes);
      next.look(keys);
    }
    if (!scales.finite) here.give_up(scales, codes);
    out += Int4Kernels::bytes(here.n, block);
    here = next;
  }
}

template <typename Round>
void encode_by(const float* x, const float* residual, std::size_t n, std::size_t block,
               const RandomPosition* position, std::byte* out, float* error) noexcept {
  const Round round(position);
  by_presence(residual, error, [=](auto has_residual, auto has_error) {
    encode_as<has_residual.value, has_error.value>(x, residual, n, block, round, out, error);
  });
}

void encode(const float* x, const float* residual, std::size_t n, std::size_t block,
            const RandomPosition* position, std::byte* out, float* error) noexcept {
  if (position == nullptr)
    encode_by<Int4ToNearest>(x, residual, n, block, position, out, error);
  else
    encode_by<Int4AtRandom>(x, residual, n, block, position, out, error);
}

Group load_group(const std::byte* codes, All, const SixteenValues& values) {
  Group v;
  each_of<kParts / 2>([&](std::size_t k) {
    const U32 pairs = unpack_bytes(codes + k * kLanes);
    v[k] = pick(values, pairs);
    v[k + kParts / 2] = pick(values, pairs >> 4);
  });
  return v;
}
Group load_group(const std::byte* codes, std::size_t count, const SixteenValues& values) {
  std::byte packed[kHalf] = {};
  __builtin_memcpy(packed, codes, bytes_of_codes(count));
  return load_group(packed, All{}, values);
}

bool has_nan(const Group& sums) {
  Parts<I32> magnitudes;
  each_part([&](std::size_t k) { magnitudes[k] = magnitude_of(sums[k]); });
  return largest_of(magnitudes) > kInfinity;
}

// The scales of a unit's groups, as floats. Returns whether all are finite.
bool read_scales(const std::byte* in, std::size_t count, std::size_t each, float* scales) {
  alignas(64) std::uint16_t sent[kBlocks] = {};
  if (each == 1 && count == kBlocks)
    __builtin_memcpy(sent, in, sizeof sent);
  else
    for (std::size_t i = 0; i < count * each && i < kBlocks; ++i)
      sent[i] = get<std::uint16_t>(in + i / each * Int4Kernels::kScaleBytes);
  I32 most{};
  for (std::size_t i = 0; i < kBlocks; i += kLanes) {
    const F32 scale =
        bits<F32>(widen(get<U16>(reinterpret_cast<const std::byte*>(sent + i))) << 16);
    most = larger(most, magnitude_of(scale));
    put(reinterpret_cast<std::byte*>(scales + i), scale);
  }
  return largest(most) < kInfinity;
}

void fill_unreadable(const float* scales, std::size_t n, float* y) {
  for (std::size_t i = 0; i < n; i += kGroup)
    if (bits<std::uint32_t>(scales[i / kGroup]) << 1 >= std::uint32_t{kInfinity} << 1)
      fill_nan(y + i, n - i < kGroup ? n - i : kGroup);
}

// Decodes a unit. Returns whether every scale is finite. The sums of all that is added tell whether
// there may be a NaN of any kind, as in int8.
template <bool kAdd>
bool decode_unit(const std::byte* in, std::size_t n, std::size_t block,
                 const Int4Kernels::Levels& levels, float* y) {
  const std::size_t blocks = (n + block - 1) / block;
  const std::byte* const codes = in + blocks * Int4Kernels::kScaleBytes;
  alignas(64) float scales[kBlocks];
  const bool finite = read_scales(in, blocks, block / kGroup, scales);
  Group sums{};
  sweep<kGroup>(n, [&](std::size_t i, auto part) {
    Group v = load_group(codes + i / 2, part, values_of(levels, scales[i / kGroup]));
    if constexpr (kAdd) {
      const Group before = load<Groups>(y, i, part);
      each_part([&](std::size_t k) {
        v[k] = before[k] + v[k];
        sums[k] = sums[k] + v[k];
      });
    }
    store<Groups>(y, i, part, v);
  });
  if (kAdd && has_nan(sums)) make_canonical(y, n);
  if (!finite) fill_unreadable(scales, n, y);
  return finite;
}

template <bool kAdd>
[[gnu::flatten]] bool decode(const std::byte* in, std::size_t n, std::size_t block,
                             const Int4Kernels::Levels& levels, float* y) noexcept {
  bool finite = true;
  for (std::size_t i = 0; i < n; i += kUnit) {
    const std::size_t length = n - i < kUnit ? n - i : kUnit;
    if (!decode_unit<kAdd>(in, length, block, levels, y + i)) finite = false;
    in += Int4Kernels::bytes(length, block);
  }
  return finite;
}

constexpr Int4Kernels kKernels = {encode, decode<false>, decode<true>};

}  // namespace int4

}  // namespace
}  // namespace gradwire::codec
