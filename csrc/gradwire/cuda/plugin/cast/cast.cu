// The codecs fp16 and bf16 (codec/cast.cc defines them).
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/cast/cast_codec.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/run_feedback.cuh"
#include "gradwire/cuda/plugin/share.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kCount = 8;  // elements of a thread
constexpr unsigned kTile = kThreads * kCount;

// A run, and its part of the first message that was received.
struct CastRun {
  const float* x;
  RunFeedback run_feedback;
  const std::uint16_t* in;
  std::uint16_t* out;
  float* y;  // null: not written
  std::uint64_t n;
};

struct CastStage {
  Batch<CastRun> runs;
  CastScale scale;
  float factor;
  Payloads received;
  bool adds;  // decoders: to y
  std::uint32_t* flags;
};

__device__ const std::uint16_t* payload(const CastRun& run, const CastStage& of, int message) {
  return reinterpret_cast<const std::uint16_t*>(reinterpret_cast<const std::byte*>(run.in) +
                                                of.received.offset(message));
}

// ---- Encoding ----------------------------------------------------------------------------------

// Adds what was received, from payload `first` on, one after the other. Returns whether all of it
// was finite.
template <typename Half, unsigned kWide>
__device__ bool add_received(const CastStage& of, const CastRun& run, std::uint64_t begin,
                             float (&v)[kCount], int first = 0) {
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  bool finite = true;
  for (int j = first; j < of.received.count; ++j) {
    std::uint16_t h[kCount];
    share.load(payload(run, of, j) + begin, run.n - begin, h);
    const bool good = add_values<Half>(of.scale, h, v);
    finite = finite && good;
  }
  return finite;
}

// Encodes a tile. Returns whether all that was decoded is finite.
template <typename Half, bool kFeedsBack, unsigned kWide>
__device__ bool encode_tile(const CastStage& of, const CastRun& run, std::uint64_t begin) {
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const std::uint64_t left = run.n - begin;
  float v[kCount], e[kCount];
  std::uint16_t h[kCount];
  Feedback feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(run.run_feedback);
  share.load(run.x + begin, left, v);
  if constexpr (kFeedsBack) share.load(feedback.before + begin, left, e);
  const bool good = add_received<Half, kWide>(of, run, begin, v);
  encode_values<Half>(of.scale, kFeedsBack, v, e, h);
  share.store(run.out + begin, left, h);
  if constexpr (kFeedsBack) share.store(feedback.after + begin, left, e);
  if (run.y == nullptr) return good;
  const bool finite = decode_values<Half>(of.scale, h, of.factor, v);
  share.store(run.y + begin, left, v);
  return good && finite;
}

__device__ bool is_wide(const CastRun& run) {
  return all_aligned(run.x, run.in, run.out, run.y) && is_aligned(run.run_feedback);
}

template <typename Half, bool kFeedsBack>
__global__ void __launch_bounds__(kThreads) encode(const __grid_constant__ CastStage of) {
  bool good = true;
  for (std::uint64_t tile = blockIdx.x; tile < of.runs.tiles(); tile += gridDim.x) {
    const unsigned r = of.runs.find(tile);
    const CastRun& run = of.runs.at[r];
    const std::uint64_t begin = (tile - of.runs.first[r]) * kTile;
    const bool is_good = is_wide(run) ? encode_tile<Half, kFeedsBack, 4>(of, run, begin)
                                      : encode_tile<Half, kFeedsBack, 1>(of, run, begin);
    good = good && is_good;
  }
  if (__syncthreads_or(!good) && threadIdx.x == 0) set_flag(of.flags, kNotFinite);
}

template <typename Half>
Status start_encode(const CastStage& of, Stream stream) {
  return launch(keeps_errors(of.runs.at[0].run_feedback) ? encode<Half, true> : encode<Half, false>,
                of.runs.tiles(), kThreads, stream, of);
}

CastStage stage_of(Cast cast, float scale, const Payloads& in, std::uint32_t* flags) {
  CastStage of{};
  of.scale = CastScale::of(cast, scale);
  of.factor = 1;
  of.received = in;
  of.flags = flags;
  return of;
}

CastRun run_of(const Run& run, const Payloads& in, std::uint64_t place, std::byte* out,
               bool writes) {
  return {run.x,
          run.run_feedback,
          reinterpret_cast<const std::uint16_t*>(in.count == 0 ? nullptr : in.first + place),
          reinterpret_cast<std::uint16_t*>(out == nullptr ? nullptr : out + run.payload),
          writes ? run.y : nullptr,
          run.n};
}

std::uint64_t tiles_of(const Run& run) { return blocks_for(run.n, kTile); }

Status cast_encode_runs(Cast cast, float scale, const Run* runs, int count, const Encoding& how,
                        std::uint32_t* flags, Stream stream) {
  CastStage of = stage_of(cast, scale, how.received, flags);
  of.factor = how.factor;
  return in_batches(
      runs, count,
      [&](const Run& run) {
        return run_of(run, how.received, run.received, how.out, how.finishes);
      },
      tiles_of,
      [&](const Batch<CastRun>& batch) {
        of.runs = batch;
        return cast == Cast::kFp16 ? start_encode<Fp16>(of, stream)
                                   : start_encode<Bf16>(of, stream);
      });
}

// ---- Decoding ----------------------------------------------------------------------------------

template <typename Half, unsigned kWide>
__device__ bool decode_tile(const CastStage& of, const CastRun& run, std::uint64_t begin) {
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const std::uint64_t left = run.n - begin;
  float v[kCount];
  bool good = true;
  if (of.adds) {
    share.load(run.y + begin, left, v);
    good = add_received<Half, kWide>(of, run, begin, v);
  } else {
    std::uint16_t h[kCount];
    share.load(payload(run, of, 0) + begin, left, h);
    good = decode_values<Half>(of.scale, h, 1, v);
    good = add_received<Half, kWide>(of, run, begin, v, 1) && good;
#pragma unroll
    for (float& each : v) each = times(each, of.factor);
  }
  share.store(run.y + begin, left, v);
  return good;
}

template <typename Half>
__global__ void __launch_bounds__(kThreads) decode(const __grid_constant__ CastStage of) {
  bool good = true;
  for (std::uint64_t tile = blockIdx.x; tile < of.runs.tiles(); tile += gridDim.x) {
    const unsigned r = of.runs.find(tile);
    const CastRun& run = of.runs.at[r];
    const std::uint64_t begin = (tile - of.runs.first[r]) * kTile;
    const bool is_good =
        is_wide(run) ? decode_tile<Half, 4>(of, run, begin) : decode_tile<Half, 1>(of, run, begin);
    good = good && is_good;
  }
  if (__syncthreads_or(!good) && threadIdx.x == 0) set_flag(of.flags, kNotFinite);
}

Status cast_decode_runs(Cast cast, float scale, const Run* runs, int count, const Decoding& how,
                        std::uint32_t* flags, Stream stream) {
  CastStage of = stage_of(cast, scale, how.payloads, flags);
  of.adds = how.adds;
  of.factor = how.factor;
  return in_batches(
      runs, count,
      [&](const Run& run) {
        CastRun made = run_of(run, how.payloads, run.payload, nullptr, true);
        made.x = nullptr;
        made.run_feedback = {};
        return made;
      },
      tiles_of,
      [&](const Batch<CastRun>& batch) {
        of.runs = batch;
        return launch(cast == Cast::kFp16 ? decode<Fp16> : decode<Bf16>, batch.tiles(), kThreads,
                      stream, of);
      });
}

}  // namespace

void fill_cast(Api& api) {
  api.cast_encode_runs = cast_encode_runs;
  api.cast_decode_runs = cast_decode_runs;
}

}  // namespace gradwire::cuda
