// Kernels on single elements, and on the states of keys.
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/run_feedback.cuh"
#include "gradwire/cuda/plugin/share.cuh"
#include "gradwire/cuda/plugin/team.cuh"

namespace gradwire::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kCount = 8;  // elements of a thread
constexpr unsigned kTile = kThreads * kCount;

template <unsigned kWide>
__global__ void __launch_bounds__(kThreads)
    deliver_kernel(RunFeedback run_feedback, float* y, std::uint64_t n) {
  const Share<kThreads, kCount, kWide> share{threadIdx.x};
  const Feedback feedback = feedback_of(run_feedback);
  for (std::uint64_t begin = std::uint64_t{blockIdx.x} * kTile; begin < n;
       begin += std::uint64_t{gridDim.x} * kTile) {
    float v[kCount], e[kCount];
    share.load(y + begin, n - begin, v);
    share.load(feedback.before + begin, n - begin, e);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      v[i] = canonical(v[i] + e[i]);
      e[i] = 0;
    }
    share.store(y + begin, n - begin, v);
    share.store(feedback.after + begin, n - begin, e);
  }
}

Status deliver(RunFeedback run_feedback, float* y, std::uint64_t n, Stream stream) {
  if (!keeps_errors(run_feedback)) return 0;
  const bool wide = is_aligned(y) && is_aligned(run_feedback);
  return launch(wide ? deliver_kernel<4> : deliver_kernel<1>, blocks_for(n, kTile), kThreads,
                stream, run_feedback, y, n);
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

template <unsigned kWide, bool kAlone>
__global__ void __launch_bounds__(kThreads)
    mark_kernel(float* y, std::uint64_t n, std::uint64_t unit, bool fills, std::uint32_t* flags) {
  const Team<kAlone> team;
  for (std::uint64_t begin = team.number() * unit; begin < n; begin += team.count() * unit) {
    const std::uint64_t length = n - begin < unit ? n - begin : unit;
    if (!team.any(!look_at<kWide>(y + begin, length, team))) continue;
    if (team.rank() == 0) set_flag(flags, kNotFinite);
    for (std::uint64_t i = team.rank(); fills && i < length; i += team.size())
      y[begin + i] = quiet_nan<float>();
  }
}

template <unsigned kWide>
Status start_mark(float* y, std::uint64_t n, std::uint64_t unit, bool fills, std::uint32_t* flags,
                  Stream stream) {
  const std::uint64_t units = blocks_for(n, unit);
  if (unit <= kOfWarp)
    return launch(mark_kernel<kWide, true>, blocks_for(units, kThreads / kWarp), kThreads, stream,
                  y, n, unit, fills, flags);
  return launch(mark_kernel<kWide, false>, units, kThreads, stream, y, n, unit, fills, flags);
}

Status mark(float* y, std::uint64_t n, std::uint64_t unit, std::uint32_t* flags, Stream stream) {
  const bool fills = unit > 1;
  const std::uint64_t looked_at = fills ? unit : kOfWarp;
  if (is_aligned(y) && looked_at % 4 == 0)
    return start_mark<4>(y, n, looked_at, fills, flags, stream);
  return start_mark<1>(y, n, looked_at, fills, flags, stream);
}

// `more` is volatile: the host may have written it after this GPU last read it.
__global__ void add_flags_kernel(const volatile std::uint32_t* more, std::uint32_t* flags) {
  if (threadIdx.x == 0 && *more != 0) *flags |= *more;
}

Status add_flags(const std::uint32_t* more, std::uint32_t* flags, Stream stream) {
  return launch(add_flags_kernel, 1, kWarp, stream, more, flags);
}

// Launched on few blocks, since it seldom has anything to do.
__global__ void poison_kernel(float* y, std::uint64_t n, const std::uint32_t* flags) {
  if (*flags == 0) return;
  for (std::uint64_t i = first_index(); i < n; i += index_stride()) y[i] = quiet_nan<float>();
}

Status poison(float* y, std::uint64_t n, const std::uint32_t* flags, Stream stream) {
  constexpr std::uint64_t kMost = 1024;
  const std::uint64_t blocks = blocks_for(n, kThreads);
  return launch(poison_kernel, blocks < kMost ? blocks : kMost, kThreads, stream, y, n, flags);
}

// ---- Keys --------------------------------------------------------------------------------------

__global__ void open_kernel(KeyState* const* key_states, std::uint64_t count) {
  for (std::uint64_t i = first_index(); i < count; i += index_stride()) {
    KeyState& key_state = *key_states[i];
    const CodecState last = key_state.codec_state[key_state.which];
    key_state.codec_state[key_state.which ^ 1U] = {last.tau, last.filter, 0, 0, 0};
  }
}

Status open(KeyState* const* key_states, std::uint64_t count, Stream stream) {
  return launch(open_kernel, blocks_for(count, kThreads), kThreads, stream, key_states, count);
}

__global__ void settle_kernel(KeyState* const* key_states, std::uint64_t count, bool remembers,
                              const std::uint32_t* flags) {
  if (*flags != 0) return;
  for (std::uint64_t i = first_index(); i < count; i += index_stride()) {
    KeyState& key_state = *key_states[i];
    key_state.which ^= 1U;
    if (remembers) key_state.which_memory ^= 1U;
    ++key_state.calls;
  }
}

Status settle(KeyState* const* key_states, std::uint64_t count, bool remembers,
              const std::uint32_t* flags, Stream stream) {
  return launch(settle_kernel, blocks_for(count, kThreads), kThreads, stream, key_states, count,
                remembers, flags);
}

}  // namespace

void fill_elements(Api& api) {
  api.deliver = deliver;
  api.mark = mark;
  api.add_flags = add_flags;
  api.poison = poison;
  api.open = open;
  api.settle = settle;
}

}  // namespace gradwire::cuda
