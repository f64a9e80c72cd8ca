// threshold (codec/threshold.cc), encoded in one pass over x and e. Where there are too few units
// for all multiprocessors, several blocks share a unit in that pass, and another kernel writes
// payloads.
#include <cfloat>
#include <cmath>

#include "gradwire/cuda/plugin/block.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/gpu.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"
#include "gradwire/cuda/plugin/sparse/sparse.cuh"
#include "gradwire/cuda/plugin/sparse/sparse_positions.cuh"
#include "gradwire/cuda/plugin/sparse/sparse_read.cuh"
#include "gradwire/cuda/plugin/sparse/sparse_select.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kTauBytes = sizeof(float);
constexpr unsigned kMostBytes = kMostPositionBytes + kTauBytes + kUnit / 8;
constexpr std::uint64_t kSlotBytes = aligned(kMostBytes);

__device__ bool usable(float tau) {
  return __float_as_uint(tau) != 0 && __float_as_uint(tau) < kInfinityBits;
}

// Returns the state of the call under way.
__device__ GpuCodecState& codec_state_of(GpuKeyState* key_state) {
  return key_state->codec_state[1 - key_state->which];
}

// ---- The first tau of an extent ----------------------------------------------------------------

constexpr std::uint64_t kMostSamples = 65536;

constexpr std::uint64_t samples_stride(std::uint64_t n) { return blocks_for(n, kMostSamples); }
constexpr std::uint64_t samples_of(std::uint64_t n) {
  return n == 0 ? 0 : blocks_for(n, samples_stride(n));
}

__global__ void __launch_bounds__(kUnitThreads)
    take_samples(const float* x, SpanFeedback span_feedback, std::uint64_t n, std::uint32_t* keys) {
  if (usable(codec_state_of(span_feedback.key_state).tau)) return;
  const float* residual = residual_of(span_feedback);
  const std::uint64_t stride = samples_stride(n);
  for (std::uint64_t i = first_index(); i * stride < n; i += index_stride()) {
    const float v = residual == nullptr ? x[i * stride] : x[i * stride] + residual[i * stride];
    keys[i] = magnitude_bits(v) < kInfinityBits ? magnitude_bits(v) : 0;
  }
}

// Sets tau, where the key has no usable one, to the share-th largest key; to the largest key where
// that is 0.
__global__ void __launch_bounds__(kUnitThreads)
    choose_first_tau(const std::uint32_t* keys, unsigned count, unsigned share,
                     GpuKeyState* key_state) {
  __shared__ SelectRoom room;
  GpuCodecState& codec_state = codec_state_of(key_state);
  const bool known = usable(codec_state.tau);
  __syncthreads();  // all threads have read tau
  if (known) return;
  std::uint32_t mine = 0;
  for (unsigned i = threadIdx.x; i < count; i += kUnitThreads)
    mine = keys[i] > mine ? keys[i] : mine;
  const std::uint32_t largest = block_largest(mine);
  const Selected found = select_largest(count, share, room, [=](auto see) {
    for (unsigned i = threadIdx.x; i < count; i += kUnitThreads) see(keys[i]);
  });
  if (threadIdx.x == 0)
    codec_state.tau = __uint_as_float(found.magnitude > 0 ? found.magnitude : largest);
}

Status threshold_prepare(const float* x, SpanFeedback span_feedback, std::uint64_t n,
                         double density, void* scratch, Stream stream) {
  if (n == 0 || density == 0 || span_feedback.key_state == nullptr) return 0;
  auto* keys = static_cast<std::uint32_t*>(scratch);
  const std::uint64_t count = samples_of(n);
  const Status status = launch(take_samples, blocks_for(count, kUnitThreads), kUnitThreads, stream,
                               x, span_feedback, n, keys);
  if (status != 0) return status;
  return launch(choose_first_tau, 1, kUnitThreads, stream, keys, static_cast<unsigned>(count),
                static_cast<unsigned>(share_of(density, count)), span_feedback.key_state);
}

// ---- The tau of each unit, where the call has none ---------------------------------------------

// Returns the call's tau; 0 where it has no usable one.
__device__ float tau_of_call(const SpanFeedback& span_feedback) {
  if (span_feedback.key_state == nullptr) return 0;
  const float tau = codec_state_of(span_feedback.key_state).tau;
  return usable(tau) ? tau : 0;
}

__global__ void __launch_bounds__(kUnitThreads, 1)
    choose_unit_taus(const __grid_constant__ SparseSpans of) {
  __shared__ SelectRoom room;
  of.spans.each_tile([&](Tile<GpuSpan> tile) {
    const SparseUnit unit{of, tile};
    if (tau_of_call(unit.feedback()) > 0) return;
    const BlockSource source = unit.source();
    float v[kUnitSteps];
    source.load(0, v);
    std::uint32_t mine = 0;
#pragma unroll
    for (float each : v) mine = magnitude_bits(each) > mine ? magnitude_bits(each) : mine;
    const std::uint32_t largest = block_largest(mine);
    float tau = 1;
    if (largest < kInfinityBits) {
      const Selected found = select_largest(source.n, unit.share(source.n), room, [&](auto see) {
#pragma unroll
        for (float each : v) see(__float_as_uint(each));
      });
      const std::uint32_t above_zero = largest > 0 ? largest : 1;
      tau = __uint_as_float(found.magnitude > 0 ? found.magnitude : above_zero);
    }
    if (threadIdx.x == 0) of.taus[tile.first + tile.number] = tau;
  });
}

__device__ float tau_of(const SparseUnit& unit) {
  const float all = unit.of.tau > 0 ? unit.of.tau : tau_of_call(unit.feedback());
  return all > 0 ? all : unit.of.taus[unit.tile.first + unit.tile.number];
}

// ---- encode ------------------------------------------------------------------------------------

struct ThresholdRoom {
  std::uint32_t hits[kUnitWords], negative[kUnitWords];
  PositionRoom positions;
  std::uint32_t payload[kSlotBytes / 4 + 1];
};

// Masks of a unit: the elements that are sent and, only in words with such, which are negative.
struct Masks {
  std::uint32_t *hits, *negative;
};

// Sets the bits of one step. Returns what is not sent.
__device__ float take(const Masks& masks, unsigned step, float v, unsigned steps, float tau) {
  const std::uint32_t magnitude = magnitude_bits(v);
  const bool hit = step < steps && magnitude >= __float_as_uint(tau);
  const unsigned hits = __ballot_sync(kAllLanes, hit);
  const bool first = threadIdx.x % kWarp == 0;
  if (first) masks.hits[mask_word(step)] = hits;
  if (hits != 0) {
    const unsigned negative = __ballot_sync(kAllLanes, __float_as_uint(v) >> 31 != 0);
    if (first) masks.negative[mask_word(step)] = negative;
  }
  const float left = __uint_as_float(magnitude) - (hit ? tau : 0.0F);
  const std::uint32_t sign = __float_as_uint(v) ^ magnitude;
  return __uint_as_float(magnitude < kInfinityBits ? __float_as_uint(left) | sign : 0);
}

// Sets the bits of some steps of a unit and writes what is not sent to `error`, which may be null.
// Returns the thread's largest magnitude.
__device__ std::uint32_t take_some(const Masks& masks, const BlockSource& source, unsigned first,
                                   float tau, float* error) {
  std::uint32_t largest = 0;
  float v[kPartSteps];
  source.load(first, v);
#pragma unroll
  for (unsigned s = 0; s < kPartSteps; ++s) {
    largest = magnitude_bits(v[s]) > largest ? magnitude_bits(v[s]) : largest;
    const float left = take(masks, first + s, v[s], source.steps, tau);
    if (error != nullptr && first + s < source.steps) error[element_of(first + s)] = left;
  }
  return largest;
}

// Writes a sign bit for each hit of the thread's word, from bit `at` on.
__device__ void write_signs(std::uint32_t hits, std::uint32_t negative, unsigned at,
                            std::uint32_t* out) {
  std::uint32_t signs = 0;
  unsigned count = 0;
  for (; hits != 0; hits &= hits - 1, ++count)
    if ((negative & hits & (~hits + 1)) != 0) signs |= 1U << count;
  put_bits(out, at, signs, count);
}

// Writes a unit's payload into the room, where it may be read after a barrier, and counts its
// elements in key_state. Returns its bytes.
__device__ unsigned write_unit(ThresholdRoom& room, unsigned n, float tau, std::uint32_t largest,
                               GpuKeyState* key_state) {
  const std::uint32_t hits = room.hits[threadIdx.x];
  const WrittenPositions positions = write_positions(hits, n, room.positions, room.payload);
  if (threadIdx.x == 0 && key_state != nullptr) {
    GpuCodecState& codec_state = codec_state_of(key_state);
    atomicAdd(reinterpret_cast<unsigned long long*>(&codec_state.sent),
              static_cast<unsigned long long>(positions.count));
    atomicMax(&codec_state.largest, largest);
  }
  if (positions.count == 0) return positions.bytes;
  const unsigned at = 8 * positions.bytes;
  if (threadIdx.x == 0) put_bits(room.payload, at, __float_as_uint(tau), 32);
  write_signs(hits, room.negative[threadIdx.x], at + 32 + positions.before, room.payload);
  return positions.bytes + kTauBytes + (positions.count + 7) / 8;
}

// Writes a unit's payload and its size, by the masks in the room.
__device__ void finish_unit(ThresholdRoom& room, const SparseUnit& unit, float tau,
                            std::uint32_t largest) {
  unsigned bytes = 1;
  if (largest < kInfinityBits)
    bytes = write_unit(room, unit_length(unit.tile.span.n, unit.tile.number), tau, largest,
                       unit.feedback().key_state);
  else if (threadIdx.x == 0)
    room.payload[0] = head_of(codec::PositionFormat::kNotFinite);
  __syncthreads();
  copy_out(room.payload, bytes, unit.slot());
  if (threadIdx.x == 0) unit.write_size(bytes);
  __syncthreads();  // nobody reads the room any more
}

__global__ void __launch_bounds__(kUnitThreads, 2) encode(const __grid_constant__ SparseSpans of) {
  __shared__ ThresholdRoom room;
  of.spans.each_tile([&](Tile<GpuSpan> tile) {
    const SparseUnit unit{of, tile};
    const BlockSource source = unit.source();
    const float tau = tau_of(unit);
    float* const error = unit.error();
    clear(room.payload, kSlotBytes / 4 + 1);
    std::uint32_t mine = 0;
    for (unsigned first = 0; first < kUnitSteps; first += kPartSteps) {
      const std::uint32_t its = take_some({room.hits, room.negative}, source, first, tau, error);
      mine = its > mine ? its : mine;
    }
    finish_unit(room, unit, tau, block_largest(mine));
  });
}

// ---- encode, where blocks share a unit ----------------------------------------------------------

// What the blocks of a unit find: masks, and the largest magnitude of each part.
struct SharedUnit {
  std::uint32_t hits[kUnitWords], negative[kUnitWords];
  std::uint32_t largest[kParts];
};

__global__ void __launch_bounds__(kUnitThreads, 2)
    take_parts(const __grid_constant__ SparseSpans of, SharedUnit* units) {
  each_part(of, [&](const SparseUnit& unit, std::uint64_t number, unsigned part) {
    SharedUnit& found = units[number];
    const std::uint32_t largest =
        block_largest(take_some({found.hits, found.negative}, unit.source(), part * kPartSteps,
                                tau_of(unit), unit.error()));
    if (threadIdx.x == 0) found.largest[part] = largest;
  });
}

__global__ void __launch_bounds__(kUnitThreads, 2)
    write_shared(const __grid_constant__ SparseSpans of, const SharedUnit* units) {
  __shared__ ThresholdRoom room;
  of.spans.each_tile([&](Tile<GpuSpan> tile) {
    const SharedUnit& found = units[tile.first + tile.number];
    const std::uint32_t hits = found.hits[threadIdx.x];
    room.hits[threadIdx.x] = hits;
    room.negative[threadIdx.x] = hits == 0 ? 0 : found.negative[threadIdx.x];
    clear(room.payload, kSlotBytes / 4 + 1);
    const std::uint32_t largest =
        block_largest(threadIdx.x < kParts ? found.largest[threadIdx.x] : 0);
    const SparseUnit unit{of, tile};
    finish_unit(room, unit, tau_of(unit), largest);
  });
}

Status threshold_encode_spans(float tau, double density, const GpuSpan* spans, int count,
                              const Encoding& how, void* scratch, Stream stream) {
  if (how.received.count > 0 || how.finishes) return cudaErrorInvalidValue;
  auto* const taus = static_cast<float*>(scratch);
  std::uint64_t units = 0;
  for (int i = 0; i < count; ++i) units += units_of(spans[i].n);
  auto* const shared = reinterpret_cast<SharedUnit*>(static_cast<std::byte*>(scratch) +
                                                     aligned(units * sizeof(float)));
  return in_sparse_batches(
      {{}, how.out, kSlotBytes, density, tau, taus}, spans, count, [&](const SparseSpans& of) {
        const std::uint64_t tiles = of.spans.tiles();
        Status status = 0;
        if (tau == 0) status = launch(choose_unit_taus, tiles, kUnitThreads, stream, of);
        if (status != 0) return status;
        if (!are_shared(tiles)) return launch(encode, tiles, kUnitThreads, stream, of);
        status = launch(take_parts, tiles * kParts, kUnitThreads, stream, of, shared);
        if (status != 0) return status;
        return launch(write_shared, tiles, kUnitThreads, stream, of, shared);
      });
}

// ---- adapt -------------------------------------------------------------------------------------

constexpr double kStep = 0.6, kMostRise = 3, kFar = 4;
constexpr float kLongestWait = 256, kHeadroom = 1.25F;

__device__ double limit(double x, double least, double most) {
  return x < least ? least : most < x ? most : x;
}

__global__ void adapt(std::uint64_t n, double density, GpuKeyState* key_state) {
  GpuCodecState& codec_state = codec_state_of(key_state);
  const float largest = __uint_as_float(codec_state.largest);
  if (threadIdx.x > 0 || !usable(codec_state.tau) || !usable(largest)) return;
  const double elements = density * static_cast<double>(n);
  const double ratio = static_cast<double>(codec_state.sent) / (elements > 1 ? elements : 1);
  double tau = codec_state.tau;
  tau *= 1 + kStep * __dsqrt_rn(density) * limit(ratio - 1, -1, kMostRise);
  if (ratio > kFar) {
    const double rise = __dsqrt_rn(__dsqrt_rn(__dsqrt_rn(ratio / kFar)));
    tau *= rise < 2 ? rise : 2;
  }
  tau = limit(tau, largest / kLongestWait, static_cast<double>(largest) * kHeadroom);
  codec_state.tau = static_cast<float>(
      limit(tau, static_cast<double>(__uint_as_float(1)), static_cast<double>(FLT_MAX)));
}

Status threshold_adapt(std::uint64_t n, double density, GpuKeyState* key_state, Stream stream) {
  if (density == 0 || key_state == nullptr) return 0;
  return launch(adapt, 1, kWarp, stream, n, density, key_state);
}

// ---- decode ------------------------------------------------------------------------------------

// Reads what follows the positions of a unit: tau, and the signs.
class Signs {
 public:
  __device__ unsigned bytes(unsigned count) const {
    return count == 0 ? 0 : kTauBytes + (count + 7) / 8;
  }
  // Opens the values of at least one element. Returns whether their tau is usable.
  __device__ bool open(Foreign in) {
    in_ = in;
    tau_ = in.word(0);
    return tau_ != 0 && tau_ < kInfinityBits;
  }
  __device__ float at(unsigned rank) const {
    const std::uint32_t sign = in_.byte(kTauBytes + rank / 8) >> (rank % 8) & 1U;
    return __uint_as_float(tau_ | sign << 31);
  }

 private:
  Foreign in_{};
  std::uint32_t tau_ = 0;
};

Status threshold_decode_spans(const GpuSpan* spans, int count, const Decoding& how,
                              std::uint32_t* flags, Stream stream) {
  return decode_spans<Signs>(kSlotBytes, spans, count, how, flags, stream);
}

std::size_t threshold_scratch_bytes(std::uint64_t units) {
  const std::uint64_t samples = (units < kMostSamples / kUnit ? units * kUnit : kMostSamples) * 4;
  const std::uint64_t taus = units * sizeof(float);
  return aligned(samples > taus ? samples : taus) + shared_units(units) * sizeof(SharedUnit);
}

}  // namespace

void fill_threshold(Api& api) {
  api.threshold_prepare = threshold_prepare;
  api.threshold_adapt = threshold_adapt;
  api.threshold_encode_spans = threshold_encode_spans;
  api.threshold_decode_spans = threshold_decode_spans;
  api.threshold_scratch_bytes = threshold_scratch_bytes;
}

}  // namespace gradwire::cuda
