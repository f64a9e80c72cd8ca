// threshold and topk: masks of the elements that pass a bound, without a branch.
#pragma once

#include "gradwire/codec/simd_group.h"
#include "gradwire/codec/sparse.h"

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

// Magnitudes compare as integers; `bound - 1 - magnitude` has the sign of a hit.
template <bool kResidual, bool kKeep, bool kSubtract>
std::uint32_t pick_from(GroupSource<kResidual> source, float tau, std::size_t n,
                        std::uint64_t* hits, std::uint64_t* signs, float* kept) noexcept {
  const auto bound = bits<std::int32_t>(tau);
  I32 seen{};
  sweep<kGroup>(n, [&](std::size_t i, auto part) {
    Group v = source(i, part);
    std::uint32_t hit = 0, sign = 0;
    each_part([&](std::size_t k) {
      const I32 magnitude = magnitude_of(v[k]);
      const I32 below = bound - 1 - magnitude;
      seen = magnitude > seen ? magnitude : seen;
      hit |= sign_bits(bits<F32>(below)) << (k * kLanes);
      if constexpr (kSubtract) {
        sign |= sign_bits(v[k]) << (k * kLanes);
        const I32 signed_tau = (bits<I32>(v[k]) ^ magnitude) | bound;
        v[k] = v[k] - bits<F32>(signed_tau & (below >> 31));
      }
    });
    put(reinterpret_cast<std::byte*>(hits) + i / 8, hit & present(part));
    if constexpr (kSubtract) put(reinterpret_cast<std::byte*>(signs) + i / 8, sign);
    if constexpr (kKeep) store<Groups>(kept, i, part, v);
  });
  return static_cast<std::uint32_t>(largest(seen));
}

template <bool kSubtract>
std::uint32_t pick(const float* x, const float* residual, float tau, std::size_t n,
                   std::uint64_t* hits, std::uint64_t* signs, float* kept) noexcept {
  if (residual != nullptr && kept != nullptr)
    return pick_from<true, true, kSubtract>({x, residual}, tau, n, hits, signs, kept);
  if (residual != nullptr)
    return pick_from<true, false, kSubtract>({x, residual}, tau, n, hits, signs, kept);
  if (kept != nullptr)
    return pick_from<false, true, kSubtract>({x, residual}, tau, n, hits, signs, kept);
  return pick_from<false, false, kSubtract>({x, residual}, tau, n, hits, signs, kept);
}

std::uint32_t filter(const float* x, const float* residual, float tau, std::size_t n,
                     std::uint64_t* hits, float* v) noexcept {
  return pick<false>(x, residual, tau, n, hits, nullptr, v);
}

constexpr SparseKernels kKernels = {pick<true>, filter};

}  // namespace sparse
}  // namespace
}  // namespace gradwire::codec
