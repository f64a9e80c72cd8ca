// Units of int4 (codec/int4.cc defines it): the scales of their blocks, then half a byte an
// element. A warp handles a unit.
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/cuda/plugin/block.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/payloads.cuh"
#include "gradwire/cuda/plugin/rounding.cuh"
#include "gradwire/cuda/plugin/share.cuh"

namespace gradwire::cuda::int4 {

using codec::Int4Kernels;

inline constexpr unsigned kUnit = Int4Kernels::kUnit;
inline constexpr unsigned kCount = kUnit / kWarp;  // elements of a thread
inline constexpr unsigned kGroup = 32;             // elements whose codes lie together
inline constexpr unsigned kHalf = kGroup / 2;      // bytes of these
static_assert(kUnit / kGroup == kWarp);            // lane g holds what is of group g

__host__ __device__ constexpr std::uint64_t bytes_of_scales(std::uint64_t n, std::uint64_t block) {
  return (n + block - 1) / block * Int4Kernels::kScaleBytes;
}

// Returns a number that is the larger the larger the value's magnitude is; the last bit is the
// sign.
__device__ inline std::uint32_t key_of(float v) {
  return __float_as_uint(v) << 1 | __float_as_uint(v) >> 31;
}
// Returns the largest key of `end` lanes, a power of two, from a multiple of it on.
__device__ inline std::uint32_t largest_key(std::uint32_t key, unsigned end) {
  for (unsigned by = 1; by < end; by *= 2) key = Larger{}(key, __shfl_xor_sync(kAllLanes, key, by));
  return key;
}

struct Scale {
  float scale, inverse;

  __device__ static Scale of(std::uint32_t key, bool stochastic) {
    const std::uint32_t most = key >> 1;
    if (most >= kInfinityBits) return {quiet_nan<float>(), 0};
    if (__uint_as_float(most) < 0x1p-100F) return {0, 0};
    const std::uint32_t carry = stochastic ? 0xFFFFU : 0x7FFFU + ((most >> 16) & 1U);
    const float rounded = __uint_as_float((most + carry) & 0xFFFF0000U);
    const float limited = rounded > Int4Kernels::kMostScale ? Int4Kernels::kMostScale : rounded;
    const float scale = (key & 1U) != 0 && !stochastic ? -limited : limited;
    return {scale, (stochastic ? 7.0F : 1.0F) / scale};
  }
};

// What codes stand for, in units of the scale. Lane c holds the level of code c % 16.
class Levels {
 public:
  __device__ explicit Levels(bool stochastic) {
    const unsigned code = threadIdx.x % 16;
    const auto most = static_cast<float>(code <= 8 ? code : 16 - code);  // |q|
    const float equal = (most < 7.0F ? most : 7.0F) / 7.0F;
    const float level = stochastic ? equal : (3.0F - sqrtf(9.0F - most)) / 2.0F;
    own_ = code <= 8 ? level : -level;
  }
  // All lanes of the warp call it.
  __device__ float operator()(std::uint32_t code) const {
    return __shfl_sync(kAllLanes, own_, static_cast<int>(code));
  }

 private:
  float own_;
};

// A thread's share of a unit: which groups its elements are of, and who has the other half of their
// bytes. Each kWide elements from a multiple of kWide on are of one group.
template <unsigned kWide>
struct UnitShare : Share<kWarp, kCount, kWide> {
  static constexpr unsigned kLanes = kGroup / kWide;  // that hold a group
  static constexpr unsigned kTurns = kCount / kWide;
  using Base = Share<kWarp, kCount, kWide>;

  __device__ unsigned group(unsigned turn) const { return Base::element(turn * kWide) / kGroup; }
  __device__ bool is_first_half() const { return Base::rank % kLanes < kLanes / 2; }
  __device__ unsigned byte() const { return Base::rank % (kLanes / 2) * kWide; }

  // Returns `mine` of the turn and lane that hold the first elements of group number `lane`.
  template <typename T>
  __device__ T of_own_group(const T (&mine)[kTurns]) const {
    constexpr unsigned kPerTurn = kWarp / kLanes;
    T found{};
    for (unsigned turn = 0; turn < kTurns; ++turn) {
      const T here = __shfl_sync(kAllLanes, mine[turn], Base::rank % kPerTurn * kLanes);
      if (Base::rank / kPerTurn == turn) found = here;
    }
    return found;
  }
};

// Returns how many bytes the codes of n elements from the beginning of a group on have.
__device__ inline unsigned bytes_of_codes(std::uint64_t n) {
  return n < kHalf ? static_cast<unsigned>(n) : kHalf;
}

// Returns the scale of group `lane` of a unit's payload; sets a flag where it is none.
__device__ inline float scale_at(const std::byte* payload, std::uint64_t n, std::uint64_t block,
                                 unsigned lane, std::uint32_t* flags) {
  if (lane * kGroup >= n) return 0;
  const auto top = reinterpret_cast<const std::uint16_t*>(payload)[lane * kGroup / block];
  const float scale = __uint_as_float(std::uint32_t{top} << 16);
  if (is_finite(scale)) return scale;
  if (lane * kGroup % block == 0) set_flag(flags, kNotFinite);
  return quiet_nan<float>();
}

// Adds a unit of each payload in turn. `payloads` has their count(), and the unit's payload in
// each, at(j). It sets v first unless it adds.
template <unsigned kWide, typename Received>
__device__ void add_units(const UnitShare<kWide>& share, const Received& payloads, std::uint64_t n,
                          std::uint64_t block, const Levels& levels, bool adds,
                          std::uint32_t* flags, float (&v)[kCount]) {
  for (int j = 0; j < payloads.count(); ++j) {
    const std::byte* const payload = payloads.at(j);
    const float of_group = scale_at(payload, n, block, share.rank, flags);
    const auto* const codes =
        reinterpret_cast<const std::uint8_t*>(payload + bytes_of_scales(n, block));
#pragma unroll
    for (unsigned turn = 0; turn < share.kTurns; ++turn) {
      const unsigned group = share.group(turn);
      const float scale = __shfl_sync(kAllLanes, of_group, group);
      const std::uint64_t first = std::uint64_t{group} * kGroup;
      const unsigned bytes = first < n ? bytes_of_codes(n - first) : 0;
#pragma unroll
      for (unsigned k = 0; k < kWide; ++k) {
        const unsigned byte = share.byte() + k;
        const std::uint32_t pair = byte < bytes ? codes[group * kHalf + byte] : 0;
        const float each = levels((share.is_first_half() ? pair : pair >> 4) & 0xFU) * scale;
        float& mine = v[turn * kWide + k];
        mine = canonical(adds || j > 0 ? mine + each : each);
      }
    }
  }
}

// Decodes a unit: y := y + each payload in turn, or the sum of all payloads times factor.
template <unsigned kWide, typename Received>
__device__ void decode_unit(const Received& payloads, std::uint64_t n, std::uint64_t block,
                            const Levels& levels, bool adds, float factor, std::uint32_t* flags,
                            float* y) {
  const UnitShare<kWide> share{threadIdx.x % kWarp};
  float v[kCount];
  if (adds) share.load(y, n, v);
  add_units<kWide>(share, payloads, n, block, levels, adds, flags, v);
#pragma unroll
  for (float& each : v) each = times(each, factor);
  share.store(y, n, v);
}

// A unit that a warp encodes.
template <bool kFeedsBack, unsigned kWide, typename Received>
struct UnitEncoder {
  const float* x;
  const float* before;  // e and e', with feedback
  float* after;
  float* y;  // null: not written
  std::byte* out;
  std::uint64_t n, block;
  float factor;  // of y
  std::uint32_t* flags;
  const Received& payloads;  // that are added to x
  const Levels& levels;
  UnitShare<kWide> share;

  __device__ void encode(const Rounding& round) const {
    float v[kCount];
    load(v);
    const Scale of_group = scale_of_group(v, round.stochastic());
    store_scale(of_group.scale);
    auto* const codes = reinterpret_cast<std::uint8_t*>(out + bytes_of_scales(n, block));
    float decoded[kCount];
    for (unsigned turn = 0; turn < share.kTurns; ++turn) {
      const Scale by = {__shfl_sync(kAllLanes, of_group.scale, share.group(turn)),
                        __shfl_sync(kAllLanes, of_group.inverse, share.group(turn))};
      write(v + turn * kWide, decoded + turn * kWide, turn, by, round, codes);
    }
    if constexpr (kFeedsBack) share.store(after, n, v);
    if (y != nullptr) share.store(y, n, decoded);
  }

 private:
  __device__ void load(float (&v)[kCount]) const {
    share.load(x, n, v);
    add_units<kWide>(share, payloads, n, block, levels, /*adds=*/true, flags, v);
    if constexpr (kFeedsBack) {
      float e[kCount];
      share.load(before, n, e);
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i) v[i] = v[i] + e[i];
    }
    if (n == kUnit) return;
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i)
      if (share.element(i) >= n) v[i] = 0;  // what was received may say otherwise
  }

  // Returns the scale of the block that group `lane` is in.
  __device__ Scale scale_of_group(const float (&v)[kCount], bool stochastic) const {
    std::uint32_t keys[UnitShare<kWide>::kTurns] = {};
    for (unsigned turn = 0; turn < share.kTurns; ++turn) {
      for (unsigned k = 0; k < kWide; ++k)
        keys[turn] = Larger{}(keys[turn], key_of(v[turn * kWide + k]));
      keys[turn] = largest_key(keys[turn], share.kLanes);
    }
    const std::uint32_t mine = share.of_own_group(keys);
    return Scale::of(largest_key(mine, static_cast<unsigned>(block) / kGroup), stochastic);
  }

  __device__ void store_scale(float scale) const {
    const unsigned first = share.rank * kGroup;
    if (first >= n || first % block != 0) return;
    reinterpret_cast<std::uint16_t*>(out)[first / block] =
        static_cast<std::uint16_t>(__float_as_uint(scale) >> 16);
    if (y != nullptr && scale != scale) set_flag(flags, kNotFinite);
  }

  // v becomes the error of kWide elements.
  __device__ void write(float* v, float* decoded, unsigned turn, Scale by, const Rounding& round,
                        std::uint8_t* codes) const {
    const bool finite = by.scale == by.scale;
    std::uint32_t mine = 0;  // a byte for each code
#pragma unroll
    for (unsigned k = 0; k < kWide; ++k) {
      const float t = v[k] * by.inverse;
      const float bent = round.stochastic() ? t : t * (12.0F - 4.0F * fabsf(t));
      float rounded = round(bent, share.element(turn * kWide + k));
      if (rounded < kRounder - 7.0F) rounded = kRounder - 7.0F;
      const std::uint32_t code = __float_as_uint(rounded) & 0xFU;
      const float its = levels(code) * by.scale;
      if (finite) mine |= code << (8 * k);
      decoded[k] = finite ? times(its, factor) : quiet_nan<float>();
      v[k] = finite ? v[k] - its : 0;
    }
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, mine, share.kLanes / 2);
    if (share.is_first_half()) store_codes(mine | other << 4, turn, codes);
  }

  __device__ void store_codes(std::uint32_t pairs, unsigned turn, std::uint8_t* codes) const {
    const unsigned group = share.group(turn), first = share.byte();
    std::uint8_t* const to = codes + group * kHalf + first;
    if (kWide == sizeof pairs && n == kUnit) {
      *reinterpret_cast<std::uint32_t*>(to) = pairs;
      return;
    }
    const std::uint64_t begin = std::uint64_t{group} * kGroup;
    const unsigned bytes = begin < n ? bytes_of_codes(n - begin) : 0;
    for (unsigned k = 0; k < kWide; ++k)
      if (first + k < bytes) to[k] = static_cast<std::uint8_t>(pairs >> (8 * k));
  }
};

}  // namespace gradwire::cuda::int4
