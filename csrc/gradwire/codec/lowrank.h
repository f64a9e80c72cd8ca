// lowrank: PowerSGD (Vogels, Karimireddy & Jaggi 2019, arXiv 1905.13727, algorithm 1) with warm
// start. All ranks approximate the sum of their matrices V (input plus residual) by p·qᵀ:
//     P = Σ V·q;  p = orthonormalise(P);  own_q = Vᵀ·p;  q = Σ own_q;
// each sum is an all_reduce. A rank keeps V − p·own_qᵀ as residual, so that what is delivered and
// all residuals add up to all inputs, whatever q the ranks began with. The next call begins with
// this one's q: over calls that is a power iteration.
//
// exec/program/program.h makes the sums. Here is what one rank computes between them, besides the
// kernels of codec/factors.h.
#pragma once

#include <span>
#include <vector>

#include "gradwire/codec/codec.h"
#include "gradwire/codec/factors.h"

namespace gradwire::codec {

// This codec needs a matrix's shape, so it has no payloads: encode and decode throw
// InvalidArgument.
class LowRank final : public Codec {
 public:
  // `rank` must be 1 to kMostRank; otherwise this throws InvalidArgument.
  explicit LowRank(std::size_t rank);

  std::size_t rank() const noexcept { return definition().rank; }
  std::size_t max_bytes(std::size_t n) const noexcept override { return n * sizeof(float); }

 private:
  std::size_t write(const float*, std::size_t, const EncodeContext&, std::byte*) const override;
  Decoded read(ConstBytes, bool, float*, std::size_t) const override;
};

// Returns whether two factors have fewer elements than the matrix. Other matrices travel as they
// are.
bool worth_factoring(const Factors& of) noexcept;

// Writes the q that a call begins with. `last` holds the columns of the q with which the last call
// ended. They are scaled by powers of two, so that the largest element lies in [kHeadroom / 2,
// kHeadroom); that changes no digit of p. A column that is all zero or not finite, or that `last`
// does not have, is drawn anew, as a function of its place alone: uniform over the odd multiples of
// 2^-23 between -1 and 1, before it is scaled. Row j of column k takes number s >> 41 of these,
// where s is number 2^32 k + j of SplitMix64's sequence from seed 0.
void start_factor(std::span<const float> last, const Factors& of, std::span<float> q);

// Takes the headroom out of a right factor, so that small values keep their digits in products with
// it, unless its largest values are above 2^64. Returns the factor by which sums of it are still to
// be multiplied.
float take_headroom(std::span<float> q);

// Makes the columns of p orthonormal by modified Gram-Schmidt, in binary64. Column after column
// subtracts its projections on those before it, in their order, each computed from its present
// value, and is then multiplied by 1 / √(its squared length). A column of which less than 2^-30 is
// left becomes zero, as that is rounding error. Sums go over 16 lanes, then lane l takes lane l +
// w, for w = 8, 4, 2, 1. The result is rounded to float32 at the end. Any finite p is allowed.
// `room` is memory that calls reuse.
void orthonormalise(const Factors& of, std::span<float> p, std::vector<double>& room);

}  // namespace gradwire::codec
