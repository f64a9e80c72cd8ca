// int8 (codec/int8.cc defines it): a block is sent as a scale, then one byte per element.
#include "gradwire/codec/blocks.h"
#include "gradwire/codec/splitmix64.h"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/run_feedback.cuh"
#include "gradwire/cuda/plugin/share.cuh"
#include "gradwire/cuda/plugin/team.cuh"

namespace gradwire::cuda {
namespace {

using codec::Int8Kernels;
using codec::splitmix64;

constexpr unsigned kThreads = 256;
constexpr unsigned kCount = 32;                // elements of a thread
constexpr unsigned kSegment = kWarp * kCount;  // elements of a block that a warp handles at once
constexpr unsigned kMostWarps = kThreads / kWarp;  // of a team

constexpr std::uint64_t payload_bytes(std::uint64_t block) { return sizeof(float) + block; }

// The sum of this and a number of at most 2^22 has the nearest integer, ties to even, in its last
// bits.
constexpr float kRounder = 0x1.8p23F;

struct Scale {
  float scale, inverse;

  __device__ static Scale of(float most) {
    if (most < 0x1p-100F) return {0, 0};
    const float scale = most / 127.0F;
    return {scale < Int8Kernels::kMostScale ? scale : Int8Kernels::kMostScale, 127.0F / most};
  }
};

// Returns kRounder + q for element i of a block, whose scaled value is t.
class Rounding {
 public:
  __device__ Rounding(bool stochastic, std::uint64_t key) : stochastic_(stochastic), key_(key) {}

  __device__ float operator()(float t, std::uint32_t i) const {
    if (!stochastic_) return t + kRounder;
    t = t > 127.0F ? 127.0F : (t < -127.0F ? -127.0F : t);
    const float nearest = (t + kRounder) - kRounder;
    const float floor = nearest > t ? nearest - 1.0F : nearest;
    return (uniform(i) < t - floor ? floor + 1.0F : floor) + kRounder;
  }

 private:
  // Returns element i's random number, in [0, 1) and of 23 bits.
  __device__ float uniform(std::uint32_t i) const {
    std::uint32_t h = i * 0x9E3779B9U + static_cast<std::uint32_t>(key_);
    h = (h ^ (h >> 16)) * 0x7FEB352DU;
    h = ((h ^ (h >> 15)) + static_cast<std::uint32_t>(key_ >> 32)) * 0x846CA68BU;
    h = h ^ (h >> 16);
    return __uint_as_float((h >> 9) | 0x3F800000U) - 1.0F;
  }

  bool stochastic_;
  std::uint64_t key_;
};

// Returns the part of the random numbers' key that all blocks of a run share.
__device__ std::uint64_t run_key(const Int8Rounding& rounding, std::uint64_t calls) {
  return splitmix64(splitmix64(rounding.seed) ^ rounding.call ^ calls);
}

// ---- Encoding ----------------------------------------------------------------------------------

// A block that a team encodes: its warps take turns at the segments. A block with more segments
// than the team has warps is read twice.
template <bool kFeedsBack, unsigned kWide, typename Team>
struct Block {
  const float* x;
  const float* before;  // e
  float* after;         // e'
  std::uint64_t n;
  std::byte* out;
  Team team;
  Share<kWarp, kCount, kWide> share;

  __device__ void load(std::uint64_t begin, float (&v)[kCount]) const {
    share.load(x + begin, n - begin, v);
    if constexpr (kFeedsBack) {
      float e[kCount];
      share.load(before + begin, n - begin, e);
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i) v[i] = v[i] + e[i];
    }
  }

  template <typename Visit>
  __device__ void each_segment(Visit visit) const {
    if constexpr (Team::kOneWarp) {
      visit(0);
    } else {
      const std::uint64_t step = team.warps() * kSegment;
      for (std::uint64_t begin = team.warp() * kSegment; begin < n; begin += step) visit(begin);
    }
  }

  __device__ void encode(const Rounding& round) const {
    float v[kCount];
    std::uint32_t most = 0;
    each_segment([&](std::uint64_t begin) {
      load(begin, v);
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i) most = Larger{}(most, magnitude_bits(v[i]));
    });
    most = team.largest(most);
    const bool finite = most<kInfinityBits, again = n> team.warps() * kSegment;
    const Scale by = finite ? Scale::of(__uint_as_float(most)) : Scale{quiet_nan<float>(), 0};
    if (team.rank() == 0) *reinterpret_cast<float*>(out) = by.scale;
    each_segment([&](std::uint64_t begin) {
      if (again) load(begin, v);
      write(v, begin, finite, by, round);
    });
  }

  __device__ void write(float (&v)[kCount], std::uint64_t begin, bool finite, Scale by,
                        const Rounding& round) const {
    std::uint8_t codes[kCount];
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const auto element = static_cast<std::uint32_t>(begin) + share.element(i);
      const float rounded = round(v[i] * by.inverse, element);
      codes[i] = finite ? static_cast<std::uint8_t>(__float_as_uint(rounded)) : 0;
      v[i] = finite ? v[i] - (rounded - kRounder) * by.scale : 0;
    }
    share.store(reinterpret_cast<std::uint8_t*>(out + sizeof(float)) + begin, n - begin, codes);
    if constexpr (kFeedsBack) share.store(after + begin, n - begin, v);
  }
};

template <bool kFeedsBack, unsigned kWide, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    encode(const float* x, RunFeedback run_feedback, std::uint64_t n, std::uint64_t block,
           Int8Rounding rounding, std::byte* out) {
  const Team<kAlone> team;
  Feedback feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(run_feedback);
  const std::uint64_t run = run_key(rounding, kFeedsBack ? run_feedback.key_state->calls : 0);
  for (std::uint64_t unit = team.number(); unit * block < n; unit += team.count()) {
    const std::uint64_t begin = unit * block;
    Feedback of_unit{};
    if constexpr (kFeedsBack) of_unit = {feedback.before + begin, feedback.after + begin};
    const Block<kFeedsBack, kWide, Team<kAlone>> here{x + begin,
                                                      of_unit.before,
                                                      of_unit.after,
                                                      n - begin < block ? n - begin : block,
                                                      out + unit * payload_bytes(block),
                                                      team,
                                                      {team.lane()}};
    here.encode({rounding.stochastic, splitmix64(run ^ (rounding.element + begin))});
  }
}

template <bool kFeedsBack, unsigned kWide>
Status start_encode(const float* x, const RunFeedback& run_feedback, std::uint64_t n,
                    std::uint64_t block, const Int8Rounding& rounding, std::byte* out,
                    Stream stream) {
  const std::uint64_t units = blocks_for(n, block);
  if (block <= kSegment)
    return launch(encode<kFeedsBack, kWide, true>, blocks_for(units, kMostWarps), kThreads, stream,
                  x, run_feedback, n, block, rounding, out);
  const std::uint64_t warps = blocks_for(block, kSegment);
  const auto threads = static_cast<unsigned>(warps < kMostWarps ? warps : kMostWarps) * kWarp;
  return launch(encode<kFeedsBack, kWide, false>, units, threads, stream, x, run_feedback, n, block,
                rounding, out);
}

template <bool kFeedsBack>
Status start_encode(const float* x, const RunFeedback& run_feedback, std::uint64_t n,
                    std::uint64_t block, const Int8Rounding& rounding, std::byte* out,
                    Stream stream) {
  return is_aligned(x) && is_aligned(run_feedback)
             ? start_encode<kFeedsBack, 4>(x, run_feedback, n, block, rounding, out, stream)
             : start_encode<kFeedsBack, 1>(x, run_feedback, n, block, rounding, out, stream);
}

Status int8_encode(const float* x, RunFeedback run_feedback, std::uint64_t n, std::uint64_t block,
                   Int8Rounding rounding, std::byte* out, Stream stream) {
  return keeps_errors(run_feedback)
             ? start_encode<true>(x, run_feedback, n, block, rounding, out, stream)
             : start_encode<false>(x, run_feedback, n, block, rounding, out, stream);
}

// ---- Decoding, by segments, since a value needs no more than its block's scale ------------------

template <bool kAdd, unsigned kWide>
__device__ void decode_segment(const std::byte* codes, float scale, std::uint64_t n, float* y) {
  const Share<kWarp, kCount, kWide> share{threadIdx.x % kWarp};
  std::int8_t q[kCount];
  float v[kCount];
  share.load(reinterpret_cast<const std::int8_t*>(codes), n, q);
  if constexpr (kAdd) share.load(y, n, v);
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    const float decoded = static_cast<float>(q[i]) * scale;
    v[i] = canonical(kAdd ? v[i] + decoded : decoded);
  }
  share.store(y, n, v);
}

template <bool kAdd, unsigned kWide>
__global__ void __launch_bounds__(kThreads)
    decode(const std::byte* in, std::uint64_t n, std::uint64_t block, std::uint64_t segments,
           float* y, std::uint32_t* flags) {
  for (std::uint64_t number = first_index() / kWarp;; number += index_stride() / kWarp) {
    const std::uint64_t unit = number / segments, inside = number % segments * kSegment;
    if (unit * block >= n) return;
    const std::uint64_t length = n - unit * block < block ? n - unit * block : block;
    if (inside >= length) continue;
    const std::byte* const payload = in + unit * payload_bytes(block);
    float scale = *reinterpret_cast<const float*>(payload);
    if (!(scale >= 0 && scale <= Int8Kernels::kMostScale)) {
      scale = quiet_nan<float>();
      if (threadIdx.x % kWarp == 0) set_flag(flags, kNotFinite);
    }
    decode_segment<kAdd, kWide>(payload + sizeof(float) + inside, scale, length - inside,
                                y + unit * block + inside);
  }
}

template <bool kAdd>
Status start_decode(const std::byte* in, std::uint64_t n, std::uint64_t block, float* y,
                    std::uint32_t* flags, Stream stream) {
  const std::uint64_t segments = blocks_for(block, kSegment);
  const std::uint64_t blocks = blocks_for(blocks_for(n, block) * segments, kMostWarps);
  return launch(is_aligned(y) ? decode<kAdd, 4> : decode<kAdd, 1>, blocks, kThreads, stream, in, n,
                block, segments, y, flags);
}

Status int8_decode(const std::byte* in, std::uint64_t n, std::uint64_t block, float* y, bool add,
                   std::uint32_t* flags, Stream stream) {
  return add ? start_decode<true>(in, n, block, y, flags, stream)
             : start_decode<false>(in, n, block, y, flags, stream);
}

}  // namespace

void fill_int8(Api& api) {
  api.int8_encode = int8_encode;
  api.int8_decode = int8_decode;
}

}  // namespace gradwire::cuda
