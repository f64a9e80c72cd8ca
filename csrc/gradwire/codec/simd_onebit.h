// onebit (codec/onebit.cc defines it): signs, and the means of both halves of a block.
#pragma once

#include "gradwire/codec/simd_onebit_sum.h"
#include "gradwire/codec/simd_runs.h"

namespace gradwire::codec {
namespace {

std::uint32_t nonzero_word(const Group& v) {
  Group marked;
  each_part([&](std::size_t k) { marked[k] = v[k] == F32{} ? F32{} : -F32{}; });
  return word_of(marked);
}

// The lanes' sum in halves: with the one 16, then 8, 4, 2, 1 further on.
float tree_sum(Group lanes) {
  for (std::size_t half = kParts / 2; half > 0; half /= 2)
    for (std::size_t k = 0; k < half; ++k) lanes[k] = lanes[k] + lanes[k + half];
  const F32 sum = fold<1>(fold<2>(fold<4>(fold<8>(lanes[0]))));
  float first;
  __builtin_memcpy(&first, &sum, sizeof first);
  return first;
}

struct SignSums {
  Group plus{}, minus{};

  void add(const Group& v) {
    each_part([&](std::size_t k) {
      plus[k] = plus[k] + positive_part(v[k]);
      minus[k] = minus[k] + negative_part(v[k]);
    });
  }
};

struct Means {
  float plus, minus;

  static Means of(const SignSums& sums, std::size_t positives, std::size_t negatives) {
    const auto mean = [](float sum, std::size_t count) {
      return count == 0 ? 0 : sum / static_cast<float>(count);
    };
    return {mean(tree_sum(sums.plus), positives), mean(tree_sum(sums.minus), negatives)};
  }
  bool finite() const {
    return (bits<std::uint32_t>(plus) & kInfinity) != kInfinity &&
           (bits<std::uint32_t>(minus) & kInfinity) != kInfinity;
  }
};

constexpr float kHugeScale = 0x1p-24F;

// Sums of which are finite, of any finite values.
Means limited(Means scaled) {
  constexpr float kLimit = 0x1.FFFFFEp127F * kHugeScale;
  const float plus = scaled.plus < kLimit ? scaled.plus : kLimit;
  const float minus = scaled.minus > -kLimit ? scaled.minus : -kLimit;
  return {plus / kHugeScale, minus / kHugeScale};
}

// One block; the first pass leaves v in `error`, where that is more than x, and all signs in out.
template <bool kResidual, bool kError>
class OneBitBlock {
 public:
  OneBitBlock(GroupSource<kResidual> source, float* error, std::size_t n, std::byte* out)
      : source_(source), error_(error), n_(n), out_(out), bits_(out + 2 * sizeof(float)) {}

  // Returns the end of what was written.
  std::byte* encode() {
    const SignSums sums = first_pass();
    std::byte* end = bits_ + OneBitKernels::bytes_of_bits(n_);
    const bool masked = 16 * zeros_ > n_;
    if (masked) end = write_mask();
    const std::size_t positives = n_ - negatives_ - (masked ? zeros_ : 0);
    Means means = Means::of(sums, positives, negatives_);
    if (!means.finite()) {
      if (!finite_block()) return give_up();
      means = limited(Means::of(scaled_sums(), positives, negatives_));
    }
    put_means(means, masked);
    if constexpr (kError) masked ? write_error<true>(means) : write_error<false>(means);
    return end;
  }

 private:
  static constexpr bool kStored = kResidual && kError;

  // Before the error is written.
  template <typename PartOf>
  Group value(std::size_t i, PartOf part) const {
    if constexpr (kStored)
      return load<Groups>(error_, i, part);
    else
      return source_(i, part);
  }

  [[gnu::flatten]] SignSums first_pass() {
    SignSums sums;
    I32 equal{};
    std::uint32_t negatives = 0;
    sweep<kGroup>(n_, [&](std::size_t i, auto part) {
      const Group v = source_(i, part);
      if constexpr (kStored) store<Groups>(error_, i, part, v);
      sums.add(v);
      // A comparison is 1 where lanes are plain values, and -1 in vectors.
      each_part([&](std::size_t k) { equal = equal + static_cast<I32>(v[k] == F32{}); });
      const std::uint32_t word = word_of(v);
      negatives += count_of(word);
      store_word(bits_, i, part, word);
    });
    const std::size_t padding = (n_ + kGroup - 1) / kGroup * kGroup - n_;
    zeros_ = magnitude_of_sum(equal) - padding;
    negatives_ = negatives;
    return sums;
  }

  void put_means(Means means, bool masked) {
    const float minus = __builtin_fabsf(means.minus);
    put(out_, masked ? -means.plus : means.plus);
    put(out_ + sizeof(float), !masked ? means.minus : has_runs_ ? minus : -minus);
  }

  static std::size_t magnitude_of_sum(I32 lanes) {
    std::int32_t each[kLanes], sum = 0;
    __builtin_memcpy(each, &lanes, sizeof lanes);
    for (std::int32_t lane : each) sum += lane;
    return static_cast<std::size_t>(sum < 0 ? -sum : sum);
  }

  // In place of all signs, and behind it the signs of those it shows.
  std::byte* write_mask() {
    std::byte* const signs = bits_ + OneBitKernels::bytes_of_bits(n_);
    std::byte* const end = write_bitmap(signs);
    std::byte runs[OneBitKernels::kMostBlock / 8];
    const std::size_t size = write_runs(bits_, n_, runs);
    has_runs_ = size > 0;
    if (!has_runs_) return end;
    __builtin_memcpy(bits_, runs, size);
    __builtin_memmove(bits_ + size, signs, static_cast<std::size_t>(end - signs));
    return bits_ + size + (end - signs);
  }

  std::byte* write_bitmap(std::byte* signs) {
    BitWriter writer(signs);
    negatives_ = 0;
    sweep<kGroup>(n_, [&](std::size_t i, auto part) {
      const std::uint32_t present = nonzero_word(value(i, part));
      const std::uint32_t word = load_word(bits_, i, part) & present;
      store_word(bits_, i, part, present);
      negatives_ += count_of(word);
      writer.write(compress(word, present), count_of(present));
    });
    return writer.finish();
  }

  bool finite_block() const {
    FiniteCheck check;
    sweep<kGroup>(n_, [&](std::size_t i, auto part) {
      const Group v = value(i, part);
      each_part([&](std::size_t k) { check.see(v[k]); });
    });
    return check.holds();
  }

  SignSums scaled_sums() const {
    SignSums sums;
    sweep<kGroup>(n_, [&](std::size_t i, auto part) {
      Group v = value(i, part);
      each_part([&](std::size_t k) { v[k] = v[k] * kHugeScale; });
      sums.add(v);
    });
    return sums;
  }

  // NaN, whatever the bits say; without a mask.
  std::byte* give_up() {
    put(out_, __builtin_nanf(""));
    put(out_ + sizeof(float), __builtin_nanf(""));
    const std::size_t size = OneBitKernels::bytes_of_bits(n_);
    __builtin_memset(bits_, 0, size);
    if constexpr (kError) __builtin_memset(error_, 0, n_ * sizeof(float));
    return bits_ + size;
  }

  template <bool kMasked>
  [[gnu::flatten]] void write_error(Means means) {
    const F32 plus = F32{} + means.plus, minus = F32{} + means.minus;
    sweep<kGroup>(n_, [=, this](std::size_t i, auto part) {
      Group v = value(i, part);
      each_part([&](std::size_t k) {
        F32 y = by_sign(v[k], plus, minus);
        if constexpr (kMasked) y = v[k] == F32{} ? F32{} : y;
        v[k] = v[k] - y;
      });
      store<Groups>(error_, i, part, v);
    });
  }

  GroupSource<kResidual> source_;
  float* error_;
  std::size_t n_;
  std::byte* out_;
  std::byte* bits_;
  std::size_t zeros_ = 0;
  std::size_t negatives_ = 0;  // among those that are sent
  bool has_runs_ = false;      // in place of a mask
};

template <bool kResidual, bool kError>
std::size_t encode_onebit_as(const float* x, const float* residual, std::size_t n,
                             std::size_t block, std::byte* out, float* error) noexcept {
  std::byte* end = out;
  for (std::size_t i = 0; i < n; i += block) {
    const std::size_t length = n - i < block ? n - i : block;
    const GroupSource<kResidual> source{x + i, kResidual ? residual + i : nullptr};
    end =
        OneBitBlock<kResidual, kError>(source, kError ? error + i : nullptr, length, end).encode();
  }
  return static_cast<std::size_t>(end - out);
}

std::size_t encode_onebit(const float* x, const float* residual, std::size_t n, std::size_t block,
                          std::byte* out, float* error) noexcept {
  if (residual != nullptr && error != nullptr)
    return encode_onebit_as<true, true>(x, residual, n, block, out, error);
  if (residual != nullptr) return encode_onebit_as<true, false>(x, residual, n, block, out, error);
  if (error != nullptr) return encode_onebit_as<false, true>(x, residual, n, block, out, error);
  return encode_onebit_as<false, false>(x, residual, n, block, out, error);
}

void expand_onebit(const std::byte* packed, std::size_t bytes, const std::byte* mask, std::size_t n,
                   std::byte* out) noexcept {
  BitReader reader(packed, bytes);
  sweep<kGroup>(n, [&](std::size_t i, auto part) {
    const std::uint32_t present = load_word(mask, i, part);
    store_word(out, i, part, expand(static_cast<std::uint32_t>(reader.peek()), present));
    reader.skip(count_of(present));
  });
}

constexpr OneBitKernels kOneBit = {encode_onebit, sum_onebit, expand_onebit, read_runs};

}  // namespace
}  // namespace gradwire::codec
