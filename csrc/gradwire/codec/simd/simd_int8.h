// int8 (codec/int8.cc defines it): per block a scale, then one byte an element.
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/codec/simd/simd_group.h"
#include "gradwire/codec/simd/simd_rounding.h"

namespace gradwire::codec {
namespace {

// Each simd_<isa>.cc defines these two: pack() writes the last byte of each lane, unpack() reads
// signed bytes.
void pack(const Parts<U32>& lanes, std::byte* to);
F32 unpack(const std::byte* from);

// Codes as they lie in memory: this type writes them, the next one reads them.
struct Codes {
  using V = Parts<U32>;
  static constexpr std::size_t kCount = kGroup;
  static constexpr std::size_t kBytes = 1;
  static void store(std::byte* p, const V& lanes) { pack(lanes, p); }
};
struct DecodedCodes {
  using V = Group;
  static constexpr std::size_t kCount = kGroup;
  static constexpr std::size_t kBytes = 1;
  static V load(const std::byte* p) {
    V v;
    each_part([&](std::size_t k) { v[k] = unpack(p + k * kLanes); });
    return v;
  }
};

struct Int8Scale {
  float scale, inverse;

  static Int8Scale of(float most) {
    if (most < 0x1p-100F) return {0, 0};
    const float scale = most / 127.0F;
    return {scale < Int8Kernels::kMostScale ? scale : Int8Kernels::kMostScale, 127.0F / most};
  }
};

// One block. Its first pass finds the largest |v| and leaves v in `error` where that differs from
// x; its second pass writes codes and errors. The second pass of a block and the first of the next
// one are one loop, so that neither memory nor arithmetic waits for the other.
template <bool kResidual, bool kError, typename Round>
struct Int8Block {
  static constexpr bool kStored = kResidual && kError;

  GroupSource<kResidual> source;
  float* error;
  std::size_t n;

  template <typename PartOf>
  void look_at(std::size_t i, PartOf part, Parts<I32>& most) const {
    const Group v = source(i, part);
    if constexpr (kStored) store<Groups>(error, i, part, v);
    each_part([&](std::size_t k) { most[k] = larger(magnitude_of(v[k]), most[k]); });
  }

  template <typename PartOf>
  Group value(std::size_t i, PartOf part) const {
    if constexpr (kStored)
      return load<Groups>(error, i, part);
    else
      return source(i, part);
  }
  template <typename PartOf>
  void write(Group v, std::size_t i, PartOf part, const Round& round, Int8Scale by,
             std::byte* codes) const {
    Parts<U32> code;
    each_part([&](std::size_t k) {
      const F32 rounded = round(v[k] * by.inverse, i + k * kLanes);
      code[k] = bits<U32>(rounded);
      v[k] = v[k] - (rounded - kRounder) * by.scale;
    });
    store<Codes>(codes, i, part, code);
    if constexpr (kError) store<Groups>(error, i, part, v);
  }

  std::int32_t largest_magnitude() const {
    Parts<I32> most{};
    sweep<kGroup>(n, [&](std::size_t i, auto part) { look_at(i, part, most); });
    return largest_of(most);
  }

  void write_all(Round round, Int8Scale by, std::byte* codes) const {
    sweep<kGroup>(n, [=, here = *this](std::size_t i, auto part) {
      here.write(here.value(i, part), i, part, round, by, codes);
    });
  }

  // Returns what largest_magnitude() of the next block, which must have the same length, would
  // return.
  std::int32_t write_all_and_look(Round round, Int8Scale by, std::byte* codes,
                                  Int8Block next) const {
    Parts<I32> most{};
    sweep<kGroup>(n, [=, here = *this, &most](std::size_t i, auto part) {
      const Group v = here.value(i, part);
      next.look_at(i, part, most);
      next.source.ask_for(i + here.n);
      here.write(v, i, part, round, by, codes);
    });
    return largest_of(most);
  }

  void give_up(std::byte* out) const {
    put(out, __builtin_nanf(""));
    __builtin_memset(out + sizeof(float), 0, n);
    if constexpr (kError) __builtin_memset(error, 0, n * sizeof(float));
  }

  // `most` is what largest_magnitude() returned. Returns that of the next block.
  std::int32_t encode(std::int32_t most, const Round& round, std::byte* out,
                      const Int8Block& next) const {
    if (most >= kInfinity) {
      give_up(out);
      return next.largest_magnitude();
    }
    const auto by = Int8Scale::of(bits<float>(most));
    put(out, by.scale);
    if (next.n == n) return write_all_and_look(round, by, out + sizeof(float), next);
    write_all(round, by, out + sizeof(float));
    return next.largest_magnitude();
  }
};

template <bool kResidual, bool kError, typename Round>
[[gnu::flatten]] void encode_int8_as(const float* x, const float* residual, std::size_t n,
                                     std::size_t block, Round round, std::byte* out,
                                     float* error) noexcept {
  const auto block_at = [=](std::size_t i) {
    return Int8Block<kResidual, kError, Round>{{x + i, kResidual ? residual + i : nullptr},
                                               kError ? error + i : nullptr,
                                               n - i < block ? n - i : block};
  };
  auto here = block_at(0);
  std::int32_t most = here.largest_magnitude();
  for (std::size_t i = 0; i < n;) {
    round.start_block(i);
    i += here.n;
    const auto next = block_at(i);
    most = here.encode(most, round, out, next);
    out += sizeof(float) + here.n;
    here = next;
  }
}

template <typename Round>
void encode_int8_by(const float* x, const float* residual, std::size_t n, std::size_t block,
                    const RandomPosition* position, std::byte* out, float* error) noexcept {
  const Round round(position);
  by_presence(residual, error, [=](auto has_residual, auto has_error) {
    encode_int8_as<has_residual.value, has_error.value>(x, residual, n, block, round, out, error);
  });
}

void encode_int8(const float* x, const float* residual, std::size_t n, std::size_t block,
                 const RandomPosition* position, std::byte* out, float* error) noexcept {
  if (position == nullptr)
    encode_int8_by<ToNearest>(x, residual, n, block, position, out, error);
  else
    encode_int8_by<AtRandom<127>>(x, residual, n, block, position, out, error);
}

// y := codes · scale, or y += codes · scale. Returns whether there may be a NaN of any kind among
// the results. The sums of all that is written tell, since a look at each value would take as long
// as all the rest.
template <bool kAdd>
bool decode_codes(const std::byte* codes, float scale, std::size_t n, float* y) {
  Group sums{};
  sweep<kGroup>(n, [=, &sums](std::size_t i, auto part) {
    Group v = load<DecodedCodes>(codes, i, part);
    each_part([&](std::size_t k) { v[k] = v[k] * scale; });
    if constexpr (kAdd) {
      const Group before = load<Groups>(y, i, part);
      each_part([&](std::size_t k) {
        v[k] = before[k] + v[k];
        sums[k] = sums[k] + v[k];
      });
    }
    store<Groups>(y, i, part, v);
  });
  Parts<I32> magnitudes;
  each_part([&](std::size_t k) { magnitudes[k] = magnitude_of(sums[k]); });
  return largest_of(magnitudes) > kInfinity;
}

template <bool kAdd>
[[gnu::flatten]] bool decode_int8(const std::byte* in, std::size_t n, std::size_t block,
                                  float* y) noexcept {
  bool finite = true;
  for (std::size_t begin = 0; begin < n; begin += block) {
    const std::size_t length = n - begin < block ? n - begin : block;
    const float scale = get<float>(in);
    if (!(scale >= 0 && scale <= Int8Kernels::kMostScale)) {
      finite = false;
      fill_nan(y + begin, length);
    } else if (decode_codes<kAdd>(in + sizeof(float), scale, length, y + begin)) {
      make_canonical(y + begin, length);
    }
    in += sizeof(float) + length;
  }
  return finite;
}

constexpr Int8Kernels kInt8 = {encode_int8, decode_int8<false>, decode_int8<true>};

}  // namespace
}  // namespace gradwire::codec
