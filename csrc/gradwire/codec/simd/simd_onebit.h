// onebit (codec/onebit.cc defines it): signs, and the means of both halves of a block.
#pragma once

#include "gradwire/codec/simd/simd_onebit_sum.h"
#include "gradwire/codec/simd/simd_runs.h"

namespace gradwire::codec {
namespace {

std::uint32_t nonzero_word(const Group& v) {
  Group marked;
  each_part([&](std::size_t k) { marked[k] = v[k] == F32{} ? F32{} : -F32{}; });
  return word_of(marked);
}

template <std::size_t kHalf>
void halve(Group& lanes) {
  if constexpr (kHalf > 0) {
    each_of<kHalf>([&](std::size_t k) { lanes[k] = lanes[k] + lanes[k + kHalf]; });
    halve<kHalf / 2>(lanes);
  }
}
// Returns the sum of the lanes in halves: each takes the lane 16 further on, then 8, 4, 2 and 1.
float tree_sum(Group lanes) {
  halve<kParts / 2>(lanes);
  return first_lane<float>(fold<1>(fold<2>(fold<4>(fold<8>(lanes[0])))));
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

// What a first pass finds.
struct Seen {
  SignSums sums;
  I32 equal{};  // zeros and padding; each counts 1 where lanes are plain values, else -1
  std::uint32_t negatives = 0;

  void add(const Group& v, std::uint32_t signs) {
    sums.add(v);
    each_part([&](std::size_t k) { equal = equal + static_cast<I32>(v[k] == F32{}); });
    negatives += count_of(signs);
  }
  std::size_t zeros(std::size_t n) const {
    const auto sum = first_lane<std::int32_t>(fold<1>(fold<2>(fold<4>(fold<8>(equal)))));
    const std::size_t padding = (n + kGroup - 1) / kGroup * kGroup - n;
    return static_cast<std::size_t>(sum < 0 ? -sum : sum) - padding;
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

// Returns the means of values, given the means of the values · kHugeScale: scaled so, all sums of
// finite values are finite. Limits the results to ±FLT_MAX.
Means limited(Means scaled) {
  constexpr float kLimit = 0x1.FFFFFEp127F * kHugeScale;
  const float plus = scaled.plus < kLimit ? scaled.plus : kLimit;
  const float minus = scaled.minus > -kLimit ? scaled.minus : -kLimit;
  return {plus / kHugeScale, minus / kHugeScale};
}

struct WrittenMask {
  std::byte* end;         // of the payload
  std::size_t negatives;  // among the elements that are sent
  bool has_runs;          // in place of a bitmap
};

// One block. Its first pass leaves v in `error`, where that differs from x, and all signs behind
// the header; its second pass writes the error. The second pass of a block and the first of the
// next one are one loop, so that neither memory nor arithmetic waits for the other.
template <bool kResidual, bool kError>
struct OneBitBlock {
  static constexpr bool kStored = kResidual && kError;
  static constexpr std::size_t kHeader = 2 * sizeof(float);

  GroupSource<kResidual> source;
  float* error;
  std::size_t n;

  template <typename PartOf>
  void look_at(std::size_t i, PartOf part, std::byte* bits, Seen& seen) const {
    const Group v = source(i, part);
    if constexpr (kStored) store<Groups>(error, i, part, v);
    const std::uint32_t signs = word_of(v);
    seen.add(v, signs);
    store_word(bits, i, part, signs);
  }

  // Returns v; to be called before the error is written.
  template <typename PartOf>
  Group value(std::size_t i, PartOf part) const {
    if constexpr (kStored)
      return load<Groups>(error, i, part);
    else
      return source(i, part);
  }

  Seen first_pass(std::byte* out) const {
    Seen seen;
    sweep<kGroup>(n, [&, here = *this, bits = out + kHeader](std::size_t i, auto part) {
      here.look_at(i, part, bits, seen);
      if constexpr (!kError) here.source.ask_for(i + here.n);
    });
    return seen;
  }

  // Writes the mask in place of all signs, and behind it the signs of the elements that it shows.
  [[gnu::noinline]] WrittenMask write_mask(std::byte* bits) const {
    std::byte* const signs = bits + OneBitKernels::bytes_of_bits(n);
    WrittenMask mask = write_bitmap(bits, signs);
    std::byte runs[OneBitKernels::kMostBlock / 8];
    const std::size_t size = write_runs(bits, n, runs);
    mask.has_runs = size > 0;
    if (!mask.has_runs) return mask;
    __builtin_memcpy(bits, runs, size);
    __builtin_memmove(bits + size, signs, static_cast<std::size_t>(mask.end - signs));
    mask.end = bits + size + (mask.end - signs);
    return mask;
  }

  WrittenMask write_bitmap(std::byte* bits, std::byte* signs) const {
    BitWriter writer(signs);
    std::size_t negatives = 0;
    sweep<kGroup>(n, [&](std::size_t i, auto part) {
      const std::uint32_t present = nonzero_word(value(i, part));
      const std::uint32_t word = load_word(bits, i, part) & present;
      store_word(bits, i, part, present);
      negatives += count_of(word);
      writer.write(compress(word, present), count_of(present));
    });
    return {writer.finish(), negatives, false};
  }

  bool finite_block() const {
    FiniteCheck check;
    sweep<kGroup>(n, [&](std::size_t i, auto part) {
      const Group v = value(i, part);
      each_part([&](std::size_t k) { check.see(v[k]); });
    });
    return check.holds();
  }

  [[gnu::noinline]] Means means_of_huge(std::size_t positives, std::size_t negatives) const {
    SignSums sums;
    sweep<kGroup>(n, [&](std::size_t i, auto part) {
      Group v = value(i, part);
      each_part([&](std::size_t k) { v[k] = v[k] * kHugeScale; });
      sums.add(v);
    });
    return limited(Means::of(sums, positives, negatives));
  }

  // Writes a block that decodes to NaN, without a mask.
  [[gnu::noinline]] std::byte* give_up(std::byte* out) const {
    put(out, __builtin_nanf(""));
    put(out + sizeof(float), __builtin_nanf(""));
    const std::size_t size = OneBitKernels::bytes_of_bits(n);
    __builtin_memset(out + kHeader, 0, size);
    if constexpr (kError) __builtin_memset(error, 0, n * sizeof(float));
    return out + kHeader + size;
  }

  template <bool kMasked, typename PartOf>
  void write_error(Group v, std::size_t i, PartOf part, F32 plus, F32 minus) const {
    each_part([&](std::size_t k) {
      F32 y = by_sign(v[k], plus, minus);
      if constexpr (kMasked) y = v[k] == F32{} ? F32{} : y;
      v[k] = v[k] - y;
    });
    store<Groups>(error, i, part, v);
  }

  template <bool kMasked>
  void second_pass(Means means) const {
    const F32 plus = F32{} + means.plus, minus = F32{} + means.minus;
    sweep<kGroup>(n, [=, here = *this](std::size_t i, auto part) {
      here.template write_error<kMasked>(here.value(i, part), i, part, plus, minus);
    });
  }

  // Makes the second pass of this block and the first of the next one, which must have the same
  // length.
  template <bool kMasked>
  Seen both_passes(Means means, const OneBitBlock& next, std::byte* next_out) const {
    Seen seen;
    const F32 plus = F32{} + means.plus, minus = F32{} + means.minus;
    sweep<kGroup>(n, [=, &seen, here = *this, bits = next_out + kHeader](std::size_t i, auto part) {
      const Group v = here.value(i, part);
      next.look_at(i, part, bits, seen);
      next.source.ask_for(i + here.n);
      here.template write_error<kMasked>(v, i, part, plus, minus);
    });
    return seen;
  }

  template <bool kMasked>
  Seen finish(Means means, const OneBitBlock& next, std::byte* next_out) const {
    if constexpr (kError) {
      if (next.n == n) return both_passes<kMasked>(means, next, next_out);
      second_pass<kMasked>(means);
    }
    return next.first_pass(next_out);
  }

  // `seen` has the findings of this block's first pass and, on return, of the next block's. Returns
  // the end of what was written.
  std::byte* encode(Seen& seen, std::byte* out, const OneBitBlock& next) const {
    const std::size_t zeros = seen.zeros(n);
    const bool masked = 16 * zeros > n;
    WrittenMask written{out + kHeader + OneBitKernels::bytes_of_bits(n), seen.negatives, false};
    if (masked) written = write_mask(out + kHeader);
    const std::size_t positives = n - written.negatives - (masked ? zeros : 0);
    Means means = Means::of(seen.sums, positives, written.negatives);
    if (!means.finite()) {
      if (!finite_block()) {
        std::byte* const end = give_up(out);
        seen = next.first_pass(end);
        return end;
      }
      means = means_of_huge(positives, written.negatives);
    }
    put_means(out, means, masked, written.has_runs);
    seen =
        masked ? finish<true>(means, next, written.end) : finish<false>(means, next, written.end);
    return written.end;
  }

  static void put_means(std::byte* out, Means means, bool masked, bool has_runs) {
    const float minus = __builtin_fabsf(means.minus);
    put(out, masked ? -means.plus : means.plus);
    put(out + sizeof(float), !masked ? means.minus : has_runs ? minus : -minus);
  }
};

template <bool kResidual, bool kError>
[[gnu::flatten]] std::size_t encode_onebit_as(const float* x, const float* residual, std::size_t n,
                                              std::size_t block, std::byte* out,
                                              float* error) noexcept {
  if (n == 0) return 0;  // `out` may be null then
  const auto block_at = [=](std::size_t i) {
    return OneBitBlock<kResidual, kError>{{x + i, kResidual ? residual + i : nullptr},
                                          kError ? error + i : nullptr,
                                          n - i < block ? n - i : block};
  };
  std::byte* end = out;
  auto here = block_at(0);
  Seen seen = here.first_pass(end);
  for (std::size_t i = 0; i < n;) {
    i += here.n;
    const auto next = block_at(i);
    end = here.encode(seen, end, next);
    here = next;
  }
  return static_cast<std::size_t>(end - out);
}

std::size_t encode_onebit(const float* x, const float* residual, std::size_t n, std::size_t block,
                          std::byte* out, float* error) noexcept {
  return by_presence(residual, error, [=](auto has_residual, auto has_error) {
    return encode_onebit_as<has_residual.value, has_error.value>(x, residual, n, block, out, error);
  });
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
