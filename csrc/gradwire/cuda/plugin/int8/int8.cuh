// Blocks of int8 (codec/int8.cc defines it): a scale, then one byte per element. A warp handles a
// stripe of a block at once.
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/rounding.cuh"
#include "gradwire/cuda/plugin/share.cuh"
#include "gradwire/cuda/plugin/team.cuh"

namespace gradwire::cuda::int8 {

using codec::Int8Kernels;

inline constexpr unsigned kCount = 32;               // elements of a thread
inline constexpr unsigned kStripe = kWarp * kCount;  // elements of a block that a warp handles

constexpr std::uint64_t payload_bytes(std::uint64_t block) { return sizeof(float) + block; }

struct Scale {
  float scale, inverse;

  __device__ static Scale of(float most) {
    if (most < 0x1p-100F) return {0, 0};
    const float scale = most / 127.0F;
    return {scale < Int8Kernels::kMostScale ? scale : Int8Kernels::kMostScale, 127.0F / most};
  }
};

// Returns the scale of a block's payload; sets a flag where it is none.
__device__ inline float scale_at(const std::byte* payload, std::uint32_t* flags, bool tells) {
  const float scale = *reinterpret_cast<const float*>(payload);
  if (scale >= 0 && scale <= Int8Kernels::kMostScale) return scale;
  if (tells) set_flag(flags, kNotFinite);
  return quiet_nan<float>();
}

// Adds a stripe of each payload in turn. `payloads` has their count(), and the block's payload in
// each, at(j); `inside`: where the stripe begins in the block. It sets v first unless it adds.
template <unsigned kWide, typename Received>
__device__ void add_stripes(const Received& payloads, std::uint64_t inside, std::uint64_t n,
                            bool adds, std::uint32_t* flags, float (&v)[kCount]) {
  const Share<kWarp, kCount, kWide> share{threadIdx.x % kWarp};
  for (int j = 0; j < payloads.count(); ++j) {
    const std::byte* const payload = payloads.at(j);
    const float scale = scale_at(payload, flags, share.rank == 0);
    std::int8_t q[kCount];
    share.load(reinterpret_cast<const std::int8_t*>(payload + sizeof(float)) + inside, n, q);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const float each = static_cast<float>(q[i]) * scale;
      v[i] = canonical(adds || j > 0 ? v[i] + each : each);
    }
  }
}

// Decodes a stripe: y := y + each payload in turn, or the sum of all payloads times factor.
template <unsigned kWide, typename Received>
__device__ void decode_stripe(const Received& payloads, std::uint64_t inside, std::uint64_t n,
                              bool adds, float factor, std::uint32_t* flags, float* y) {
  const Share<kWarp, kCount, kWide> share{threadIdx.x % kWarp};
  float v[kCount];
  if (adds) share.load(y, n, v);
  add_stripes<kWide>(payloads, inside, n, adds, flags, v);
#pragma unroll
  for (float& each : v) each = times(each, factor);
  share.store(y, n, v);
}

// A block that a team encodes: its warps take turns at the stripes. A block with more stripes
// than the team has warps is read twice.
template <bool kFeedsBack, unsigned kWide, typename Team, typename Received>
struct Int8BlockEncoder {
  const float* x;
  const float* before;  // e and e', with feedback
  float* after;
  float* y;  // null: not written
  std::byte* out;
  std::uint64_t n;
  float factor;  // of y
  std::uint32_t* flags;
  const Received& payloads;  // that are added to x
  Team team;
  Share<kWarp, kCount, kWide> share;

  __device__ void load(std::uint64_t begin, float (&v)[kCount]) const {
    share.load(x + begin, n - begin, v);
    add_stripes<kWide>(payloads, begin, n - begin, /*adds=*/true, flags, v);
    if constexpr (kFeedsBack) {
      float e[kCount];
      share.load(before + begin, n - begin, e);
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i) v[i] = v[i] + e[i];
    }
  }

  template <typename Visit>
  __device__ void each_stripe(Visit visit) const {
    if constexpr (Team::kOneWarp) {
      visit(0);
    } else {
      const std::uint64_t step = team.warps() * kStripe;
      for (std::uint64_t begin = team.warp() * kStripe; begin < n; begin += step) visit(begin);
    }
  }

  __device__ void encode(const Rounding& round) const {
    float v[kCount];
    std::uint32_t most = 0;
    each_stripe([&](std::uint64_t begin) {
      load(begin, v);
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i) most = Larger{}(most, magnitude_bits(v[i]));
    });
    most = team.largest(most);
    const bool finite = most < kInfinityBits;
    const bool again = n > std::uint64_t{team.warps()} * kStripe;
    const Scale by = finite ? Scale::of(__uint_as_float(most)) : Scale{quiet_nan<float>(), 0};
    if (team.rank() == 0) *reinterpret_cast<float*>(out) = by.scale;
    if (y != nullptr && !finite && team.rank() == 0) set_flag(flags, kNotFinite);
    each_stripe([&](std::uint64_t begin) {
      if (again) load(begin, v);
      write(v, begin, finite, by, round);
    });
  }

  __device__ void write(float (&v)[kCount], std::uint64_t begin, bool finite, Scale by,
                        const Rounding& round) const {
    std::uint8_t codes[kCount];
    float decoded[kCount];
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const auto element = static_cast<std::uint32_t>(begin) + share.element(i);
      const float rounded = round(v[i] * by.inverse, element);
      codes[i] = finite ? static_cast<std::uint8_t>(__float_as_uint(rounded)) : 0;
      const float its = (rounded - kRounder) * by.scale;
      decoded[i] = finite ? times(its, factor) : quiet_nan<float>();
      v[i] = finite ? v[i] - its : 0;
    }
    auto* const bytes = reinterpret_cast<std::uint8_t*>(out + sizeof(float));
    share.store(bytes + begin, n - begin, codes);
    if constexpr (kFeedsBack) share.store(after + begin, n - begin, v);
    if (y != nullptr) share.store(y + begin, n - begin, decoded);
  }
};

}  // namespace gradwire::cuda::int8
