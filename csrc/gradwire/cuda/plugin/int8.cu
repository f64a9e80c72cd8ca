// int8 (codec/int8.cc defines it): a block is sent as a scale, then one byte per element.
#include "gradwire/codec/blocks.h"
#include "gradwire/codec/splitmix64.h"
#include "gradwire/cuda/plugin/batch.cuh"
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

// A run, and its part of the first message that was received.
struct Int8Run {
  const float* x;
  RunFeedback run_feedback;
  const std::byte* in;
  std::byte* out;
  float* y;  // null: not written
  std::uint64_t n, call, element;
};

struct Int8Stage {
  Batch<Int8Run> runs;
  std::uint64_t block, segments;  // segments: of a block
  float factor;
  std::uint64_t stride;  // bytes between the messages
  int received;
  bool adds;  // decoders: to y
  std::uint32_t* flags;
};

// Returns the scale of a block's payload; sets a flag where it is none.
__device__ float scale_at(const std::byte* payload, std::uint32_t* flags, bool tells) {
  const float scale = *reinterpret_cast<const float*>(payload);
  if (scale >= 0 && scale <= Int8Kernels::kMostScale) return scale;
  if (tells) set_flag(flags, kNotFinite);
  return quiet_nan<float>();
}

// Adds a segment of each payload in turn. `at`: the block's payload in the first message; `inside`:
// where the segment begins in the block. It sets v first unless it adds.
template <unsigned kWide>
__device__ void add_segments(const Int8Stage& of, const std::byte* at, std::uint64_t inside,
                             std::uint64_t n, bool adds, float (&v)[kCount]) {
  const Share<kWarp, kCount, kWide> share{threadIdx.x % kWarp};
  for (int j = 0; j < of.received; ++j) {
    const std::byte* const payload = at + static_cast<std::uint64_t>(j) * of.stride;
    const float scale = scale_at(payload, of.flags, share.rank == 0);
    std::int8_t q[kCount];
    share.load(reinterpret_cast<const std::int8_t*>(payload + sizeof(float)) + inside, n, q);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const float each = static_cast<float>(q[i]) * scale;
      v[i] = canonical(adds || j > 0 ? v[i] + each : each);
    }
  }
}

// ---- Encoding ----------------------------------------------------------------------------------

// A block that a team encodes: its warps take turns at the segments. A block with more segments
// than the team has warps is read twice.
template <bool kFeedsBack, unsigned kWide, typename Team>
struct Block {
  const Int8Stage& of;
  const Int8Run& run;
  Feedback feedback;    // e and e' of the run
  std::uint64_t first;  // of the block's elements
  std::uint64_t n;
  std::uint64_t payload;  // where the block's begins in its run's
  Team team;
  Share<kWarp, kCount, kWide> share;

  __device__ void load(std::uint64_t begin, float (&v)[kCount]) const {
    share.load(run.x + first + begin, n - begin, v);
    if (of.received > 0)
      add_segments<kWide>(of, run.in + payload, begin, n - begin, /*adds=*/true, v);
    if constexpr (kFeedsBack) {
      float e[kCount];
      share.load(feedback.before + first + begin, n - begin, e);
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
    const bool finite = most < kInfinityBits;
    const bool again = n > std::uint64_t{team.warps()} * kSegment;
    const Scale by = finite ? Scale::of(__uint_as_float(most)) : Scale{quiet_nan<float>(), 0};
    if (team.rank() == 0) *reinterpret_cast<float*>(run.out + payload) = by.scale;
    if (run.y != nullptr && !finite && team.rank() == 0) set_flag(of.flags, kNotFinite);
    each_segment([&](std::uint64_t begin) {
      if (again) load(begin, v);
      write(v, begin, finite, by, round);
    });
  }

  __device__ void write(float (&v)[kCount], std::uint64_t begin, bool finite, Scale by,
                        const Rounding& round) const {
    std::uint8_t codes[kCount];
    float y[kCount];
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const auto element = static_cast<std::uint32_t>(begin) + share.element(i);
      const float rounded = round(v[i] * by.inverse, element);
      codes[i] = finite ? static_cast<std::uint8_t>(__float_as_uint(rounded)) : 0;
      const float decoded = (rounded - kRounder) * by.scale;
      y[i] = finite ? times(decoded, of.factor) : quiet_nan<float>();
      v[i] = finite ? v[i] - decoded : 0;
    }
    std::byte* const out = run.out + payload + sizeof(float);
    share.store(reinterpret_cast<std::uint8_t*>(out) + begin, n - begin, codes);
    if constexpr (kFeedsBack) share.store(feedback.after + first + begin, n - begin, v);
    if (run.y != nullptr) share.store(run.y + first + begin, n - begin, y);
  }
};

template <bool kFeedsBack, unsigned kWide, typename Team>
__device__ void encode_block(const Int8Stage& of, const Int8Run& run, std::uint64_t unit,
                             const Int8Rounding& rounding) {
  Feedback feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(run.run_feedback);
  const std::uint64_t key = run_key({rounding.stochastic, rounding.seed, run.call, run.element},
                                    kFeedsBack ? run.run_feedback.key_state->calls : 0);
  const std::uint64_t first = unit * of.block, left = run.n - first;
  const Block<kFeedsBack, kWide, Team> here{of,
                                            run,
                                            feedback,
                                            first,
                                            left < of.block ? left : of.block,
                                            unit * payload_bytes(of.block),
                                            Team{},
                                            {Team::lane()}};
  here.encode({rounding.stochastic, splitmix64(key ^ (run.element + first))});
}

template <bool kFeedsBack, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    encode(const __grid_constant__ Int8Stage of, Int8Rounding rounding) {
  using Its = Team<kAlone>;
  for (std::uint64_t tile = Its::number(); tile < of.runs.tiles(); tile += Its::count()) {
    const unsigned r = of.runs.find(tile);
    const Int8Run& run = of.runs.at[r];
    const std::uint64_t unit = tile - of.runs.first[r];
    if (all_aligned(run.x, run.y) && is_aligned(run.run_feedback))
      encode_block<kFeedsBack, 4, Its>(of, run, unit, rounding);
    else
      encode_block<kFeedsBack, 1, Its>(of, run, unit, rounding);
  }
}

template <bool kFeedsBack>
Status start_encode(const Int8Stage& of, const Int8Rounding& rounding, Stream stream) {
  if (of.block <= kSegment)
    return launch(encode<kFeedsBack, true>, blocks_for(of.runs.tiles(), kMostWarps), kThreads,
                  stream, of, rounding);
  const auto threads =
      static_cast<unsigned>(of.segments < kMostWarps ? of.segments : kMostWarps) * kWarp;
  return launch(encode<kFeedsBack, false>, of.runs.tiles(), threads, stream, of, rounding);
}

Int8Stage stage_of(std::uint64_t block, const Payloads& in, float factor, std::uint32_t* flags) {
  Int8Stage of{};
  of.block = block;
  of.segments = blocks_for(block, kSegment);
  of.factor = factor;
  of.stride = in.stride;
  of.received = in.count;
  of.flags = flags;
  return of;
}

Status int8_encode_runs(std::uint64_t block, Int8Rounding rounding, const Run* runs, int count,
                        const Encoding& how, std::uint32_t* flags, Stream stream) {
  Int8Stage of = stage_of(block, how.received, how.factor, flags);
  return in_batches(
      runs, count,
      [&](const Run& run) {
        return Int8Run{run.x,
                       run.run_feedback,
                       how.received.count == 0 ? nullptr : how.received.first + run.received,
                       how.out + run.payload,
                       how.finishes ? run.y : nullptr,
                       run.n,
                       run.call,
                       run.element};
      },
      [block](const Run& run) { return blocks_for(run.n, block); },
      [&](const Batch<Int8Run>& batch) {
        of.runs = batch;
        return keeps_errors(batch.at[0].run_feedback) ? start_encode<true>(of, rounding, stream)
                                                      : start_encode<false>(of, rounding, stream);
      });
}

Status int8_encode(const float* x, RunFeedback run_feedback, std::uint64_t n, std::uint64_t block,
                   Int8Rounding rounding, std::byte* out, Stream stream) {
  const Run run{.x = x,
                .n = n,
                .run_feedback = run_feedback,
                .call = rounding.call,
                .element = rounding.element};
  return int8_encode_runs(block, rounding, &run, 1, {.out = out}, nullptr, stream);
}

// ---- Decoding, by segments, since a value needs no more than its block's scale ------------------

template <unsigned kWide>
__device__ void decode_segment(const Int8Stage& of, const std::byte* at, std::uint64_t inside,
                               std::uint64_t n, float* y) {
  const Share<kWarp, kCount, kWide> share{threadIdx.x % kWarp};
  float v[kCount];
  if (of.adds) share.load(y, n, v);
  add_segments<kWide>(of, at, inside, n, of.adds, v);
#pragma unroll
  for (float& each : v) each = times(each, of.factor);
  share.store(y, n, v);
}

__global__ void __launch_bounds__(kThreads) decode(const __grid_constant__ Int8Stage of) {
  for (std::uint64_t tile = first_index() / kWarp; tile < of.runs.tiles();
       tile += index_stride() / kWarp) {
    const unsigned r = of.runs.find(tile);
    const Int8Run& run = of.runs.at[r];
    const std::uint64_t number = tile - of.runs.first[r];
    const std::uint64_t unit = number / of.segments, inside = number % of.segments * kSegment;
    const std::uint64_t left = run.n - unit * of.block;
    const std::uint64_t length = left < of.block ? left : of.block;
    if (inside >= length) continue;
    const std::byte* const at = run.in + unit * payload_bytes(of.block);
    float* const y = run.y + unit * of.block + inside;
    if (is_aligned(run.y))
      decode_segment<4>(of, at, inside, length - inside, y);
    else
      decode_segment<1>(of, at, inside, length - inside, y);
  }
}

Status int8_decode_runs(std::uint64_t block, const Run* runs, int count, const Decoding& how,
                        std::uint32_t* flags, Stream stream) {
  Int8Stage of = stage_of(block, how.payloads, how.factor, flags);
  of.adds = how.adds;
  return in_batches(
      runs, count,
      [&](const Run& run) {
        return Int8Run{nullptr, {}, how.payloads.first + run.payload, nullptr, run.y, run.n, 0, 0};
      },
      [&](const Run& run) { return blocks_for(run.n, block) * of.segments; },
      [&](const Batch<Int8Run>& batch) {
        of.runs = batch;
        return launch(decode, blocks_for(batch.tiles(), kMostWarps), kThreads, stream, of);
      });
}

Status int8_decode(const std::byte* in, std::uint64_t n, std::uint64_t block, float* y, bool add,
                   std::uint32_t* flags, Stream stream) {
  const Run run{.y = y, .n = n};
  return int8_decode_runs(block, &run, 1, {.payloads = {in, 0, 1}, .adds = add}, flags, stream);
}

}  // namespace

void fill_int8(Api& api) {
  api.int8_encode = int8_encode;
  api.int8_decode = int8_decode;
  api.int8_encode_runs = int8_encode_runs;
  api.int8_decode_runs = int8_decode_runs;
}

}  // namespace gradwire::cuda
