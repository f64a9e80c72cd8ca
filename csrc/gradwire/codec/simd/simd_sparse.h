// threshold and topk: masks of the elements that pass a bound, without a branch.
#pragma once

#include "gradwire/codec/blocks.h"
#include "gradwire/codec/simd/simd_group.h"

namespace gradwire::codec {
namespace {
namespace sparse {

template <typename PartOf>
std::uint32_t present(PartOf part) {
  if constexpr (std::is_same_v<PartOf, All>)
    return ~std::uint32_t{0};
  else
    return (std::uint32_t{1} << part) - 1;
}

// Cache lines of a group so many elements ahead, perhaps in the next block, are prefetched. For
// data out of the cache this made threshold a sixth faster, for data in it slower by a twelfth.
constexpr std::size_t kAhead = 1024;

// Compares magnitudes as integers: `bound - 1 - magnitude` has the sign of a hit. What is kept has
// the sign of v.
template <bool kResidual, bool kKeep, bool kSubtract>
std::uint32_t pick_from(GroupSource<kResidual> source, float tau, std::size_t n,
                        std::uint64_t* hits, float* kept) noexcept {
  const auto bound = bits<std::int32_t>(tau);
  Parts<I32> seen{};
  sweep<kGroup>(n, [&](std::size_t i, auto part) {
    Group v = source(i, part);
    source.ask_for(i + kAhead);
    std::uint32_t hit = 0;
    each_part([&](std::size_t k) {
      const I32 magnitude = magnitude_of(v[k]);
      const I32 below = bound - 1 - magnitude;
      seen[k] = larger(magnitude, seen[k]);
      hit |= sign_bits(bits<F32>(below)) << (k * kLanes);
      if constexpr (kSubtract && kKeep) {
        const F32 sent = magnitude > bound - 1 ? F32{} + tau : F32{};
        const F32 left = bits<F32>(magnitude) - sent;
        v[k] = bits<F32>(bits<I32>(left) | (bits<I32>(v[k]) ^ magnitude));
      }
    });
    put(reinterpret_cast<std::byte*>(hits) + i / 8, hit & present(part));
    if constexpr (kKeep) store<Groups>(kept, i, part, v);
  });
  return static_cast<std::uint32_t>(largest_of(seen));
}

template <bool kSubtract>
std::uint32_t pick(const float* x, const float* residual, float tau, std::size_t n,
                   std::uint64_t* hits, float* kept) noexcept {
  return by_presence(residual, kept, [=](auto has_residual, auto has_kept) {
    return pick_from<has_residual.value, has_kept.value, kSubtract>({x, residual}, tau, n, hits,
                                                                    kept);
  });
}

constexpr SparseKernels kKernels = {pick<true>, pick<false>};

}  // namespace sparse
}  // namespace
}  // namespace gradwire::codec
