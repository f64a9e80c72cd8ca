// Kernels on single elements, and on the states of keys.
#include "gradwire/cuda/plugin/batch.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/share.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"
#include "gradwire/cuda/plugin/team.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kCount = 8;  // elements of a thread
constexpr unsigned kTile = kThreads * kCount;

std::uint64_t tiles_of(const GpuSpan& span) { return blocks_for(span.n, kTile); }

template <unsigned kWide>
__device__ void deliver_tile(const GpuSpan& span, std::uint64_t begin) {
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const Residuals feedback = feedback_of(span.span_feedback);
  const std::uint64_t left = span.n - begin;
  float v[kCount], e[kCount];
  share.load(span.x + begin, left, v);
  share.load(feedback.before + begin, left, e);
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    v[i] = canonical(v[i] + e[i]);
    e[i] = 0;
  }
  share.store(span.y + begin, left, v);
  share.store(feedback.after + begin, left, e);
}

__global__ void __launch_bounds__(kThreads)
    deliver_kernel(const __grid_constant__ Batch<GpuSpan> of) {
  of.each_tile([](Tile<GpuSpan> tile) {
    const GpuSpan& span = tile.span;
    if (all_aligned(span.x, span.y) && is_aligned(span.span_feedback))
      deliver_tile<4>(span, tile.number * kTile);
    else
      deliver_tile<1>(span, tile.number * kTile);
  });
}

// Spans without a residual are left as they are.
Status deliver_spans(const GpuSpan* spans, int count, Stream stream) {
  return in_batches(
      spans, count,
      [](const GpuSpan& span) {
        return keeps_errors(span.span_feedback) ? blocks_for(span.n, kTile) : 0;
      },
      [&](const Batch<GpuSpan>& batch) {
        return launch(deliver_kernel, batch.tiles(), kThreads, stream, batch);
      });
}

// ---- Values that are not finite ----------------------------------------------------------------

constexpr unsigned kOfWarp = 1024;  // elements that a warp checks at once
constexpr unsigned kMarked = kOfWarp / kWarp;

// Returns whether the elements of a unit of n elements that this thread checks are all finite.
template <unsigned kWide, typename Team>
__device__ bool look_at(const float* y, std::uint64_t n, Team team) {
  const Share<kWarp, kMarked, kWide> share{team.lane()};
  bool finite = true;
  for (std::uint64_t i = team.warp() * kOfWarp; i < n; i += team.warps() * kOfWarp) {
    float v[kMarked];
    share.load(y + i, n - i, v);
#pragma unroll
    for (unsigned k = 0; k < kMarked; ++k) finite = finite && is_finite(v[k]);
  }
  return finite;
}

struct Marked {
  Batch<GpuSpan> spans;
  std::uint64_t unit;
  bool fills;
  std::uint32_t* flags;
};

template <bool kAlone>
__global__ void __launch_bounds__(kThreads) mark_kernel(const __grid_constant__ Marked of) {
  const Team<kAlone> team;
  of.spans.each_tile(team.number(), team.count(), [&](Tile<GpuSpan> tile) {
    const std::uint64_t begin = tile.number * of.unit, left = tile.span.n - begin;
    const std::uint64_t length = left < of.unit ? left : of.unit;
    float* const y = tile.span.y + begin;
    const bool finite = is_aligned(y) ? look_at<4>(y, length, team) : look_at<1>(y, length, team);
    if (!team.any(!finite)) return;
    if (team.rank() == 0) set_flag(of.flags, kNotFinite);
    for (std::uint64_t i = team.rank(); of.fills && i < length; i += team.size())
      y[i] = quiet_nan<float>();
  });
}

Status mark_spans(const GpuSpan* spans, int count, std::uint64_t unit, std::uint32_t* flags,
                  Stream stream) {
  Marked of{{}, unit > 1 ? unit : kOfWarp, unit > 1, flags};
  return in_batches(
      spans, count, [&of](const GpuSpan& span) { return blocks_for(span.n, of.unit); },
      [&](const Batch<GpuSpan>& batch) {
        of.spans = batch;
        if (of.unit <= kOfWarp)
          return launch(mark_kernel<true>, blocks_for(batch.tiles(), kThreads / kWarp), kThreads,
                        stream, of);
        return launch(mark_kernel<false>, batch.tiles(), kThreads, stream, of);
      });
}

// `more` is volatile: the host may have written it after this GPU last read it.
__global__ void add_flags_kernel(const volatile std::uint32_t* more, std::uint32_t* flags) {
  if (threadIdx.x != 0) return;
  const std::uint32_t bits = *more;
  if (bits != 0) *flags |= bits;
}

Status add_flags(const std::uint32_t* more, std::uint32_t* flags, Stream stream) {
  return launch(add_flags_kernel, 1, kWarp, stream, more, flags);
}

// Launched on few blocks, since it seldom has anything to do.
__global__ void __launch_bounds__(kThreads)
    poison_kernel(const __grid_constant__ Batch<GpuSpan> of, const std::uint32_t* flags) {
  if (*flags == 0) return;
  of.each_tile([](Tile<GpuSpan> tile) {
    const std::uint64_t begin = tile.number * kTile;
    for (std::uint64_t i = begin + threadIdx.x; i < begin + kTile && i < tile.span.n; i += kThreads)
      tile.span.y[i] = quiet_nan<float>();
  });
}

Status poison(const GpuSpan* spans, int count, const std::uint32_t* flags, Stream stream) {
  constexpr std::uint64_t kMost = 1024;
  return in_batches(spans, count, tiles_of, [&](const Batch<GpuSpan>& batch) {
    const std::uint64_t blocks = batch.tiles() < kMost ? batch.tiles() : kMost;
    return launch(poison_kernel, blocks, kThreads, stream, batch, flags);
  });
}

// ---- Keys --------------------------------------------------------------------------------------

__global__ void open_kernel(GpuKeyState* const* key_states, std::uint64_t count) {
  for (std::uint64_t i = first_index(); i < count; i += index_stride()) {
    GpuKeyState& key_state = *key_states[i];
    const GpuCodecState last = key_state.codec_state[key_state.which];
    key_state.codec_state[key_state.which ^ 1U] = {last.tau, 0, 0};
  }
}

Status open(GpuKeyState* const* key_states, std::uint64_t count, Stream stream) {
  return launch(open_kernel, blocks_for(count, kThreads), kThreads, stream, key_states, count);
}

__global__ void settle_kernel(GpuKeyState* const* key_states, std::uint64_t count, bool remembers,
                              const std::uint32_t* flags) {
  if (*flags != 0) return;
  for (std::uint64_t i = first_index(); i < count; i += index_stride()) {
    GpuKeyState& key_state = *key_states[i];
    key_state.which ^= 1U;
    if (remembers) key_state.which_memory ^= 1U;
    ++key_state.calls;
  }
}

Status settle(GpuKeyState* const* key_states, std::uint64_t count, bool remembers,
              const std::uint32_t* flags, Stream stream) {
  return launch(settle_kernel, blocks_for(count, kThreads), kThreads, stream, key_states, count,
                remembers, flags);
}

// ---- Scales ------------------------------------------------------------------------------------

struct Scaled {
  Batch<GpuSpan> spans;
  double factor;
  const float *now, *before;

  __device__ double all() const {
    if (now == nullptr || before == nullptr) return factor;
    const float to = *now, from = *before;
    return to > 0 && from > 0 && is_finite(to) && is_finite(from)
               ? factor * (static_cast<double>(to) / static_cast<double>(from))
               : factor;
  }
};

constexpr float kMostFloat = 0x1.FFFFFEp127F;

__device__ float scaled(float x, double factor) {
  const auto product = static_cast<float>(static_cast<double>(x) * factor);
  if (is_finite(product)) return product;
  return __uint_as_float(__float_as_uint(kMostFloat) | (__float_as_uint(product) & 0x80000000U));
}

__global__ void __launch_bounds__(kThreads) scale_kernel(const __grid_constant__ Scaled of) {
  const double factor = of.all();
  if (factor == 1) return;
  const Share<kThreads, kCount, 1> share{threadIdx.x};
  of.spans.each_tile([&](Tile<GpuSpan> tile) {
    const GpuSpan& span = tile.span;
    const std::uint64_t begin = tile.number * kTile;
    GpuKeyState& key_state = *span.span_feedback.key_state;
    float* const residual = one_of(span.span_feedback.residual, key_state.which) + begin;
    float e[kCount];
    share.load(residual, span.n - begin, e);
#pragma unroll
    for (float& each : e) each = scaled(each, factor);
    share.store(residual, span.n - begin, e);
    if (begin > 0 || threadIdx.x > 0) return;
    GpuCodecState& codec_state = key_state.codec_state[key_state.which];
    const double magnitude = factor < 0 ? -factor : factor;
    codec_state.tau = scaled(codec_state.tau, magnitude);
  });
}

Status scale_residuals(const GpuSpan* spans, int count, double factor, const float* now,
                       const float* before, Stream stream) {
  Scaled of{{}, factor, now, before};
  return in_batches(spans, count, tiles_of, [&](const Batch<GpuSpan>& batch) {
    of.spans = batch;
    return launch(scale_kernel, batch.tiles(), kThreads, stream, of);
  });
}

// ---- What was sent -----------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    clear_sent_kernel(const __grid_constant__ Batch<GpuSpan> of) {
  const Share<kThreads, kCount, 1> share{threadIdx.x};
  of.each_tile([&](Tile<GpuSpan> tile) {
    const GpuSpan& span = tile.span;
    const std::uint64_t begin = tile.number * kTile;
    float y[kCount], e[kCount];
    share.load(span.y + begin, span.n - begin, y);
    share.load(residual_of(span.span_feedback) + begin, span.n - begin, e);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) y[i] = e[i] == 0 ? 0 : y[i];
    share.store(span.y + begin, span.n - begin, y);
  });
}

Status clear_sent(const GpuSpan* spans, int count, Stream stream) {
  return in_batches(spans, count, tiles_of, [&](const Batch<GpuSpan>& batch) {
    return launch(clear_sent_kernel, batch.tiles(), kThreads, stream, batch);
  });
}

}  // namespace

void fill_elements(Api& api) {
  api.deliver_spans = deliver_spans;
  api.mark_spans = mark_spans;
  api.add_flags = add_flags;
  api.poison = poison;
  api.open = open;
  api.settle = settle;
  api.scale_residuals = scale_residuals;
  api.clear_sent = clear_sent;
}

}  // namespace gradwire::cuda
