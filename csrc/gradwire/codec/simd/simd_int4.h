// int4 (codec/int4.cc defines it): per unit the scales of its blocks, then half a byte an element.
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/codec/simd/simd_group.h"
#include "gradwire/codec/simd/simd_onebit_sum.h"
#include "gradwire/codec/simd/simd_rounding.h"

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

// What a block's elements are multiplied by, for each block of a unit. Both are 0 for a block that
// is too small, and the scale is NaN for one that is not finite.
struct Scales {
  alignas(64) float scale[kBlocks];
  alignas(64) float inverse[kBlocks];
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

// The largest key of each group of a unit, and then of each block.
struct Keys {
  U32 in_lanes[kBlocks];
  alignas(64) std::uint32_t of[kBlocks];

  void join_lanes() {
    for (std::size_t i = 0; i < kBlocks; i += kLanes)
      put(reinterpret_cast<std::byte*>(of + i), largest_of_each<kLanes>(in_lanes + i));
  }
  void join_groups(std::size_t each) {
    for (std::size_t i = 0; i < kBlocks; ++i) {
      const std::uint32_t key = of[i];
      std::uint32_t& most = of[i / each];
      most = i % each == 0 || key > most ? key : most;
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
    const F32 slope = 12.0F - 4.0F * bits<F32>(magnitude_of(t));
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

// Writes the scales of `count` blocks to `out`, and keeps them in `scales`.
template <typename Round>
void choose_scales(const Keys& keys, std::size_t count, std::byte* out, Scales& scales) {
  sweep<kLanes>(count, [&](std::size_t i, auto part) {
    const U32 key = get<U32>(reinterpret_cast<const std::byte*>(keys.of + i));
    const I32 most = bits<I32>(key >> 1);
    I32 chosen = limited_scale(Round::scale(most)) | bits<I32>(Round::sign(key));
    chosen = most < kLeastBits ? I32{} : chosen;
    F32 inverse = Round::kOverScale / bits<F32>(chosen);
    inverse = most < kLeastBits ? F32{} : inverse;
    chosen = most < kInfinity ? chosen : bits<I32>(nan<float>());
    store<Halves>(out, i, part, narrow(bits<U32>(chosen) >> 16));
    put(reinterpret_cast<std::byte*>(scales.scale + i), chosen);
    put(reinterpret_cast<std::byte*>(scales.inverse + i), inverse);
  });
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

// A unit. Its first pass finds the largest keys of its blocks and leaves v in `error` where that
// differs from x; its second pass writes codes and errors.
template <bool kResidual, bool kError>
struct Unit {
  static constexpr bool kStored = kResidual && kError;

  GroupSource<kResidual> source;
  float* error;
  std::size_t n, block;

  template <typename Visit>
  void each_block(Visit visit) const {
    std::size_t number = 0;
    for (std::size_t begin = 0; begin < n; begin += block)
      visit(number++, begin, n - begin < block ? n - begin : block);
  }

  void look(Keys& keys) const {
    if (n < kUnit) keys = {};
    sweep<kGroup>(n, [&](std::size_t i, auto part) {
      const Group v = source(i, part);
      if constexpr (kStored) store<Groups>(error, i, part, v);
      U32 most = key_of(v[0]);
      each_of<kParts - 1>([&](std::size_t k) { most = larger(most, key_of(v[k + 1])); });
      keys.in_lanes[i / kGroup] = most;
    });
    keys.join_lanes();
    if (block > kGroup) keys.join_groups(block / kGroup);
  }

  template <typename PartOf>
  Group value(std::size_t i, PartOf part) const {
    if constexpr (kStored)
      return load<Groups>(error, i, part);
    else
      return source(i, part);
  }

  template <typename PartOf, typename Round>
  void write_group(std::size_t i, PartOf part, const Round& round, float inverse,
                   const SixteenValues& values, std::byte* codes) const {
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

  void give_up(std::size_t begin, std::size_t length, std::byte* codes) const {
    sweep<kGroup>(length, [&](std::size_t i, auto part) {
      __builtin_memset(codes + (begin + i) / 2, 0, bytes_of_codes(part));
    });
    if constexpr (kError) __builtin_memset(error + begin, 0, length * sizeof(float));
  }

  template <typename Round>
  void write(const Scales& scales, const Round& round, std::byte* codes) const {
    each_block([&](std::size_t number, std::size_t begin, std::size_t length) {
      const float scale = scales.scale[number], inverse = scales.inverse[number];
      if (scale != scale) return give_up(begin, length, codes);
      const SixteenValues values = values_of(Round::kLevels, scale);
      sweep<kGroup>(length, [&](std::size_t i, auto part) {
        write_group(begin + i, part, round, inverse, values, codes);
      });
    });
  }
};

template <bool kResidual, bool kError, typename Round>
[[gnu::flatten]] void encode_as(const float* x, const float* residual, std::size_t n,
                                std::size_t block, Round round, std::byte* out,
                                float* error) noexcept {
  Keys keys;
  Scales scales;
  for (std::size_t i = 0; i < n; i += kUnit) {
    const Unit<kResidual, kError> unit{{x + i, kResidual ? residual + i : nullptr},
                                       kError ? error + i : nullptr,
                                       n - i < kUnit ? n - i : kUnit,
                                       block};
    const std::size_t blocks = (unit.n + block - 1) / block;
    unit.look(keys);
    choose_scales<Round>(keys, blocks, out, scales);
    round.start_unit(i);
    unit.write(scales, round, out + blocks * Int4Kernels::kScaleBytes);
    out += Int4Kernels::bytes(unit.n, block);
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

// y := the values of the codes, or y += them. Adds all that it writes to `sums`.
template <bool kAdd>
void decode_codes(const std::byte* codes, const SixteenValues& values, std::size_t n, float* y,
                  Group& sums) {
  sweep<kGroup>(n, [=, &values, &sums](std::size_t i, auto part) {
    Group v = load_group(codes + i / 2, part, values);
    if constexpr (kAdd) {
      const Group before = load<Groups>(y, i, part);
      each_part([&](std::size_t k) {
        v[k] = before[k] + v[k];
        sums[k] = sums[k] + v[k];
      });
    }
    store<Groups>(y, i, part, v);
  });
}

bool has_nan(const Group& sums) {
  Parts<I32> magnitudes;
  each_part([&](std::size_t k) { magnitudes[k] = magnitude_of(sums[k]); });
  return largest_of(magnitudes) > kInfinity;
}

// Decodes a unit. Returns whether every scale is valid.
template <bool kAdd>
bool decode_unit(const std::byte* in, std::size_t n, std::size_t block,
                 const Int4Kernels::Levels& levels, float* y) {
  const std::byte* const codes = in + (n + block - 1) / block * Int4Kernels::kScaleBytes;
  bool finite = true;
  Group sums{};
  for (std::size_t begin = 0; begin < n; begin += block, in += Int4Kernels::kScaleBytes) {
    const std::size_t length = n - begin < block ? n - begin : block;
    const float scale = bits<float>(std::uint32_t{get<std::uint16_t>(in)} << 16);
    if (scale >= -Int4Kernels::kMostScale && scale <= Int4Kernels::kMostScale) {
      decode_codes<kAdd>(codes + begin / 2, values_of(levels, scale), length, y + begin, sums);
    } else {
      finite = false;
      fill_nan(y + begin, length);
    }
  }
  if (kAdd && has_nan(sums)) make_canonical(y, n);
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
