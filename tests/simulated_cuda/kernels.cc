// Blocks, warps and barriers.
#include <algorithm>
#include <mutex>
#include <random>
#include <vector>

#include "fibers.h"
#include "simulated_cuda.h"
#include "streams.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simulated {
namespace {

struct Warp {
  std::uint64_t values[2][32];  // of an operation and of the next
  unsigned arrived = 0;
  unsigned operation = 0;
};
std::vector<Warp> warps;
std::vector<unsigned> at_barrier;
int gathered[2], gathering[2];  // of a barrier's predicates: any, count

void set_thread(unsigned index) { threadIdx = {index, 0, 0}; }

void wait_here() {
  const unsigned me = current_fiber();
  suspend();
  set_thread(me);
}

// At the barrier, with a predicate.
void barrier(int predicate) {
  gathering[0] |= predicate != 0 ? 1 : 0;
  gathering[1] += predicate != 0 ? 1 : 0;
  at_barrier.push_back(current_fiber());
  if (at_barrier.size() < blockDim.x) return wait_here();
  std::copy_n(gathering, 2, gathered);
  std::fill_n(gathering, 2, 0);
  for (unsigned each : at_barrier) resume(each);
  at_barrier.clear();
  wait_here();  // one of them, in random order
}

}  // namespace

void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& thread) {
  if (threads == 0 || threads % 32 != 0 || threads > 1024) fatal("a block of another size");
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_bits());
  gridDim = {blocks, 1, 1};
  blockDim = {threads, 1, 1};
  unsigned late = 0;  // a warp that runs when hardly another can, or none
  const auto pick = [&late](const std::vector<unsigned>& ready) {
    std::size_t at = random_bits()() % ready.size();
    for (int tries = 0; tries < 16 && ready[at] / 32 == late; ++tries)
      at = random_bits()() % ready.size();
    return at;
  };
  const std::function<void(unsigned)> body = [&](unsigned index) {
    set_thread(index);
    thread();
  };
  for (unsigned block : order) {
    blockIdx = {block, 0, 0};
    warps.assign(threads / 32, {});
    at_barrier.clear();
    late = static_cast<unsigned>(random_bits()() % (threads / 16));
    run_fibers(threads, body, pick);
  }
}

void sync_threads() { barrier(0); }

unsigned lane() { return threadIdx.x % 32; }

const std::uint64_t* exchange(unsigned mask, std::uint64_t mine) {
  if (mask != 0xFFFFFFFFU) fatal("an operation of a part of a warp");
  const unsigned me = current_fiber();
  Warp& warp = warps[me / 32];
  auto& values = warp.values[warp.operation % 2];
  values[me % 32] = mine;
  if (++warp.arrived < 32) {
    wait_here();
    return values;
  }
  warp.arrived = 0;
  ++warp.operation;
  for (unsigned i = 0; i < 32; ++i)
    if (me / 32 * 32 + i != me) resume(me / 32 * 32 + i);
  return values;
}

}  // namespace simulated

// A thread reads what was gathered before any can gather anew: that takes all of them.
int __syncthreads_or(int predicate) {
  simulated::barrier(predicate);
  return simulated::gathered[0];
}
int __syncthreads_count(int predicate) {
  simulated::barrier(predicate);
  return simulated::gathered[1];
}
int __syncthreads_and(int predicate) {
  return __syncthreads_count(predicate) == static_cast<int>(blockDim.x) ? 1 : 0;
}

namespace {
template <typename Join>
unsigned reduce(unsigned mask, unsigned value, Join join) {
  const std::uint64_t* all = simulated::exchange(mask, value);
  auto result = static_cast<unsigned>(all[0]);
  for (int i = 1; i < 32; ++i) result = join(result, static_cast<unsigned>(all[i]));
  return result;
}
}  // namespace

unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return reduce(mask, value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  return reduce(mask, value, [](unsigned a, unsigned b) { return std::min(a, b); });
}
unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return reduce(mask, value, [](unsigned a, unsigned b) { return a + b; });
}
unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return reduce(mask, value, [](unsigned a, unsigned b) { return a | b; });
}
unsigned __brev(unsigned x) {
  unsigned turned = 0;
  for (int i = 0; i < 32; ++i, x >>= 1) turned = turned << 1 | (x & 1U);
  return turned;
}

__half __float2half_rn(float x) {
  if (std::isnan(x)) return {0x7FFF};
  const auto sign = static_cast<unsigned short>(std::signbit(x) ? 0x8000 : 0);
  const double magnitude = std::fabs(static_cast<double>(x));
  if (magnitude >= 65520) return {static_cast<unsigned short>(sign | 0x7C00)};
  const int exponent = std::max(magnitude == 0 ? -14 : std::ilogb(magnitude), -14);
  // A carry out of the digits lands in the exponent, where it belongs.
  const auto digits = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return {static_cast<unsigned short>(sign | (((exponent + 14) << 10) + digits))};
}
float __half2float(__half h) {
  const int exponent = h.bits >> 10 & 31, digits = h.bits & 1023;
  if (exponent == 31 && digits != 0) return std::bit_cast<float>(0x7FFFFFFF);
  const float magnitude = exponent == 31 ? INFINITY
                          : exponent == 0
                              ? std::ldexp(static_cast<float>(digits), -24)
                              : std::ldexp(static_cast<float>(1024 + digits), exponent - 25);
  return (h.bits & 0x8000) != 0 ? -magnitude : magnitude;
}
