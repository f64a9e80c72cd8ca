// threshold: sends ±τ for each element that reaches it (Strom 2015); the rest stays in the error.
// For each block of v := x + residual, in binary32, each operation rounded once:
//   sent where |v| >= τ; y := copysign(τ, v) there and 0 elsewhere; error := v − y, and −0 where
//   v is −τ: an error has the sign of its v, so that one pass needs no mask of signs.
//   A block with NaN or Inf decodes to NaN; its errors are the same, 0 where v is not finite.
// A block's record in the payload: its positions (codec/sparse.h); then, if any, τ as float32 and
// one sign bit for each position, first bit lowest.
//
// τ is given (tau=), or follows a target density, per array and rank:
//   prepare: the first τ reaches the density on |x + residual|, of which only every k-th element
//   is looked at in a large array. Where that τ would be 0, it is the largest element looked at.
//   adapt: with feedback, elements walk at random until they reach τ, so that density is about
//   (σ / τ)² for steps of σ. A step of τ is a fixed part of σ, because moving τ by σ already stops
//   or doubles what is sent. With r := sent / target,
//     τ := τ · (1 + 0.6 · sqrt(density) · limit(r − 1, −1, 3))
//     τ := τ · min(2, (r / 4)^(1/8)) where r > 4: the data has another scale
//     τ := limit(τ, L / 256, L · 1.25) where L > 0 is the largest |v| that was encoded: an element
//     waits for 256 calls at most, even where fewer are not zero than the target.
// Without feedback each call prepares anew. Where all of x was 0, or prepare() was not called, each
// block takes as τ the smallest of the magnitudes that the target density would send of it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/sparse.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

constexpr double kDefaultDensity = 0.001;
constexpr std::size_t kMostSamples = 65536;
constexpr double kStep = 0.6, kMostRise = 3, kFar = 4;
constexpr float kLongestWait = 256, kHeadroom = 1.25F;

bool usable(float tau) { return tau > 0 && std::isfinite(tau); }

// Returns the magnitude that the density reaches among finite values, by a sample that depends on n
// alone.
float first_tau(const float* x, std::size_t n, const EncodeContext& context, double density) {
  thread_local std::vector<std::uint32_t> keys;
  keys.clear();
  const std::size_t stride = (n + kMostSamples - 1) / kMostSamples;
  for (std::size_t i = 0; i < n; i += stride) {
    const std::uint32_t key = magnitude_bits(x[i] + context.residual_at(i));
    keys.push_back(key < kInfinityBits ? key : 0);
  }
  const std::size_t share = share_of(density, keys.size());
  const auto nth = keys.begin() + static_cast<std::ptrdiff_t>(share - 1);
  std::nth_element(keys.begin(), nth, keys.end(), std::greater<>());
  return std::bit_cast<float>(*nth > 0 ? *nth : *std::max_element(keys.begin(), nth + 1));
}

class Threshold final : public SparseCodec {
 public:
  Threshold(const std::string& name, float tau, double density)
      : SparseCodec(name, {.kind = Definition::Kind::kThreshold, .tau = tau, .density = density},
                    {6e-11, 2e-11}),
        tau_(tau),
        density_(density) {}

  void prepare(const float* x, std::size_t n, const EncodeContext& context) const override {
    if (tau_ > 0 || n == 0 || usable(context.codec_state->tau)) return;
    context.codec_state->tau = first_tau(x, n, context, density_);
  }
  void adapt(std::size_t n, CodecState& codec_state) const override;

 private:
  std::size_t most_bytes(std::size_t n) const noexcept override {
    return most_position_bytes(n) + sizeof(float) + (n + 7) / 8;
  }
  // Returns τ for one block, which is chosen from the block alone where nothing else says it.
  float tau_of(SparseSource block, const CodecState* state) const;
  std::size_t encode_block(SparseSource block, float* error, CodecState* state,
                           std::byte* out) const override;
  bool read_values(PayloadReader& reader, const Positions& positions, bool add,
                   float* y) const override;

  float tau_;       // 0: follows density_
  double density_;  // the target
};

void Threshold::adapt(std::size_t n, CodecState& codec_state) const {
  if (tau_ > 0 || !usable(codec_state.tau) || !usable(codec_state.largest)) return;
  const double target = std::max(1.0, density_ * static_cast<double>(n));
  const double ratio = static_cast<double>(codec_state.sent) / target;
  double tau = codec_state.tau;
  tau *= 1 + kStep * std::sqrt(density_) * std::clamp(ratio - 1, -1.0, kMostRise);
  if (ratio > kFar) tau *= std::min(2.0, std::sqrt(std::sqrt(std::sqrt(ratio / kFar))));
  const double most = std::numeric_limits<float>::max();
  const double least = std::numeric_limits<float>::denorm_min();
  tau = std::clamp<double>(tau, codec_state.largest / kLongestWait,
                           double{codec_state.largest} * kHeadroom);
  codec_state.tau = static_cast<float>(std::clamp(tau, least, most));
}

// Writes a sign bit for each position; `v` has the signs.
std::size_t write_signs(const Positions& positions, SparseSource v, std::byte* out) {
  const std::size_t bytes = (positions.count + 7) / 8;
  std::memset(out, 0, bytes);
  for (std::size_t k = 0; k < positions.count; ++k) {
    const std::uint32_t sign = std::bit_cast<std::uint32_t>(v[positions.index[k]]) >> 31;
    out[k / 8] |= static_cast<std::byte>(sign << (k % 8));
  }
  return bytes;
}

// Returns the largest magnitude at the positions, or the least float above 0 where all are 0.
float largest_of(SparseSource block, const Positions& positions) {
  float most = std::numeric_limits<float>::denorm_min();
  for (const std::size_t i : positions.all()) most = std::max(most, std::fabs(block[i]));
  return most;
}

float Threshold::tau_of(SparseSource block, const CodecState* state) const {
  if (tau_ > 0) return tau_;
  if (state != nullptr && usable(state->tau)) return state->tau;
  SparseScratch& scratch = SparseScratch::mine();
  float filter = 0;
  const std::uint32_t smallest =
      select_largest(block, share_of(density_, block.n), nullptr, filter, scratch);
  if (smallest >= kInfinityBits) return 1;
  return smallest > 0 ? std::bit_cast<float>(smallest) : largest_of(block, scratch.positions);
}

std::size_t Threshold::encode_block(SparseSource block, float* error, CodecState* state,
                                    std::byte* out) const {
  const float tau = tau_of(block, state);
  SparseScratch& scratch = SparseScratch::mine();
  scratch.hits[(block.n - 1) / 64] = 0;
  const std::uint32_t largest =
      kernels().sparse.threshold(block.x, block.residual, tau, block.n, scratch.hits.data(), error);
  if (largest >= kInfinityBits) {
    clear_not_finite(error, block.n);
    return write_not_finite(out);
  }
  scratch.positions.take(scratch.hits, block.n);
  if (state != nullptr) {
    state->sent += scratch.positions.count;
    state->largest = std::max(state->largest, std::bit_cast<float>(largest));
  }
  std::size_t size = write_positions(scratch.positions.all(), block.n, out);
  if (scratch.positions.count == 0) return size;
  std::memcpy(out + size, &tau, sizeof tau);
  size += sizeof tau;
  if (error != nullptr)
    block = {error, nullptr, block.n};  // has the signs of v; residual may be overwritten
  return size + write_signs(scratch.positions, block, out + size);
}

// Zeros need no `add` of their own: a sum with ±τ is ±τ.
bool Threshold::read_values(PayloadReader& reader, const Positions& positions, bool /*add*/,
                            float* y) const {
  std::uint32_t tau = 0;
  std::memcpy(&tau, reader.take(sizeof tau).data(), sizeof tau);
  if (tau == 0 || tau >= kInfinityBits)
    throw InvalidArgument("codec threshold: the payload's tau is not above 0 and finite");
  const ConstBytes signs = reader.take((positions.count + 7) / 8);
  for (std::size_t k = 0; k < positions.count; ++k) {
    const auto sign = (std::to_integer<std::uint32_t>(signs[k / 8]) >> (k % 8)) & 1U;
    y[positions.index[k]] += std::bit_cast<float>(tau | sign << 31);
  }
  return true;
}

}  // namespace

std::shared_ptr<const Codec> make_threshold(Parameters& parameters) {
  const double tau = parameters.real("tau", 0, 0x1p-126, std::numeric_limits<float>::max());
  const double density = parameters.real("density", tau > 0 ? 0 : kDefaultDensity, 1e-9, 1);
  if (tau > 0 && density > 0)
    parameters.refuse("density", shortest(density), "of no use beside tau=: give one of them");
  return std::make_shared<Threshold>(parameters.canonical(), static_cast<float>(tau), density);
}

}  // namespace gradwire::codec
