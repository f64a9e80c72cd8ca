// onebit: per block of elements (the last may be shorter) a sign each, and two values to decode
// them to, the means of the non-negatives and of the negatives (Seide et al. 2014, section 3).
// v := x + residual, in binary32, each operation rounded once:
//   Sign bits: of v; −0 is negative. 32 lanes, P_l and N_l start at +0; element i is added to lane
//   i mod 32 in ascending i, to P where its sign is clear, else to N. Both are summed in halves:
//   for w = 16, 8, 4, 2, 1: lane l := lane l + lane (l + w), l < w.
//   mean+ := P / c+, mean− := N / c−, by the counts of both signs; 0 where a count is 0.
//   y := mean− where the bit is set, else mean+; error := v − y.
//   If more than 1/16 of v equal 0, these decode to +0, and do not count in c+ and c−.
//   If P or N is not finite, either v holds NaN or Inf: then both means are NaN, all bits and
//   errors are 0, and there is no mask. Or every v is finite: then P, N and the means are those
//   of v · 2^-24, and the means are limited to ±FLT_MAX · 2^-24 and then divided by 2^-24.
//
// A block's bytes: mean+ and mean−, float32, then the sign bits, the first in the lowest bit of the
// first byte. mean+ is never negative, so its sign bit is free: it says that a mask of the v that
// are not 0 precedes the sign bits, and that there are sign bits of these v only, without gaps.
// mean− is never positive: where there is a mask, its sign bit says of which kind.
//   set    one bit per element, set where v is not 0
//   clear  the lengths of runs, alternately of zeros and of others, n elements in all, the first
//          plus 1, as it may be 0. Each is an Elias γ code: 2^k + r is k zero bits, a one bit and
//          r in k bits, the lowest first. Used only where it takes fewer bytes.
// Mask and signs each end with a whole byte. Bits beyond their end are 0, and are ignored.
//
// The sum of payloads d_0, d_1, …: T_j := ((d_4j + d_4j+1) + d_4j+2) + d_4j+3, as far as there are
// any, then (T_0 + T_1) + T_2 …
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

constexpr std::size_t kMostBlock = OneBitKernels::kMostBlock;
constexpr std::size_t kHeader = 2 * sizeof(float);

// The bits of one block, one per element, in memory that a peer cannot change.
struct Scratch {
  std::array<std::byte, kMostBlock / 8> mask;
  std::array<std::byte, kMostBlock / 8> signs;
};

std::size_t count_bits(ConstBytes bits) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < bits.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bits.data() + i, std::min(sizeof word, bits.size() - i));
    count += static_cast<std::size_t>(std::popcount(word));
  }
  return count;
}

// Reads a payload block by block.
class Cursor {
 public:
  Cursor() = default;
  Cursor(const Codec& codec, ConstBytes payload) : codec_(&codec), rest_(payload) {}

  std::size_t left() const { return rest_.size(); }
  bool finite() const { return finite_; }

  OneBitPlane next(std::size_t n, Scratch& scratch) {
    std::array<float, 2> means;
    std::memcpy(means.data(), take(kHeader, n).data(), kHeader);
    OneBitPlane plane{nullptr, nullptr, means[0], means[1]};
    if (std::signbit(means[0]))
      unpack(n, scratch, plane);
    else
      plane.signs = take(OneBitKernels::bytes_of_bits(n), n).data();
    if (!std::isfinite(means[0]) || !std::isfinite(means[1])) {
      plane.plus = plane.minus = std::numeric_limits<float>::quiet_NaN();
      finite_ = false;
    }
    return plane;
  }

 private:
  ConstBytes take(std::size_t size, std::size_t n) {
    check_room(*codec_, rest_.size(), size, n);
    const ConstBytes front = rest_.first(size);
    rest_ = rest_.subspan(size);
    return front;
  }

  void unpack(std::size_t n, Scratch& scratch, OneBitPlane& plane) {
    const auto mask = Bytes(scratch.mask).first(OneBitKernels::bytes_of_bits(n));
    std::signbit(plane.minus) ? copy_mask(n, mask) : read_runs(n, mask);
    const ConstBytes signs = take(OneBitKernels::bytes_of_bits(count_bits(mask)), n);
    kernels().one_bit.expand(signs.data(), signs.size(), mask.data(), n, scratch.signs.data());
    plane = {scratch.signs.data(), mask.data(), -plane.plus, -std::fabs(plane.minus)};
  }
  void copy_mask(std::size_t n, Bytes mask) {
    const ConstBytes bits = take(mask.size(), n);
    std::copy(bits.begin(), bits.end(), mask.begin());
    if (n % 8 != 0) mask.back() &= static_cast<std::byte>((1U << n % 8) - 1);
  }
  void read_runs(std::size_t n, Bytes mask) {
    const std::size_t size =
        kernels().one_bit.read_runs(rest_.data(), rest_.size(), n, mask.data());
    if (size == 0)
      throw InvalidArgument("codec '" + codec_->name() + "': the runs of a mask are not of its " +
                            std::to_string(n) + " elements");
    take(size, n);
  }

  const Codec* codec_ = nullptr;
  ConstBytes rest_;
  bool finite_ = true;
};

class OneBit final : public Codec {
 public:
  OneBit(const std::string& name, std::size_t block)
      : Codec({.name = name,
               .definition = {.kind = Definition::Kind::kOneBit, .block = block},
               .biased = true,
               .block = block,
               .fixed_size = false,
               .seconds_per_byte = {8e-11, 8e-11}}) {}

  // Two ranks send as many bytes either way, but encode once instead of twice when they gather.
  bool gathers(int ranks) const noexcept override { return ranks <= 2; }
  std::size_t max_bytes(std::size_t n) const noexcept override {
    const std::size_t rest = n % block();
    return n / block() * OneBitKernels::most_bytes(block()) +
           (rest == 0 ? 0 : OneBitKernels::most_bytes(rest));
  }
  std::size_t usual_bytes(std::size_t n) const noexcept override {  // no block has a mask
    return (n + block() - 1) / block() * kHeader + (n + 7) / 8;
  }

  Decoded decode_sum(std::span<const ConstBytes> payloads, float* y, std::size_t n) const override {
    Decoded all;
    if (!payloads.empty()) all.bytes = payloads.front().size();
    for (std::size_t first = 0; first < payloads.size(); first += kAtOnce) {
      const auto some = payloads.subspan(first, std::min(kAtOnce, payloads.size() - first));
      all.finite = sum(some, first, y, n) && all.finite;
    }
    return all;
  }

 private:
  static constexpr std::size_t kAtOnce = 64;  // payloads, so that their cursors fit the stack

  std::size_t write(const float* x, std::size_t n, const EncodeContext& context,
                    std::byte* out) const override {
    return kernels().one_bit.encode(x, context.residual, n, block(), out, context.error);
  }
  Decoded read(ConstBytes in, bool add, float* y, std::size_t n) const override {
    Cursor cursor(*this, in);
    Scratch scratch;
    for (std::size_t i = 0; i < n; i += block()) {
      const std::size_t length = std::min(block(), n - i);
      const OneBitPlane plane = cursor.next(length, scratch);
      kernels().one_bit.sum(&plane, 1, add, y + i, length);
    }
    return {in.size() - cursor.left(), cursor.finite()};
  }

  // Adds payloads, the first of which has number `first`. Number 0 begins the sum.
  bool sum(std::span<const ConstBytes> payloads, std::size_t first, float* y, std::size_t n) const {
    std::array<Cursor, kAtOnce> cursors;
    for (std::size_t p = 0; p < payloads.size(); ++p) cursors[p] = Cursor(*this, payloads[p]);
    const auto used = std::span(cursors).first(payloads.size());
    for (std::size_t i = 0; i < n; i += block())
      sum_block(used, /*add=*/first > 0, y + i, std::min(block(), n - i));
    for (std::size_t p = 0; p < used.size(); ++p)
      if (used[p].left() > 0)
        throw InvalidArgument("codec '" + name() + "': payload " + std::to_string(first + p) +
                              " is longer than its elements");
    return std::all_of(used.begin(), used.end(), [](const Cursor& each) { return each.finite(); });
  }

  static void sum_block(std::span<Cursor> cursors, bool add, float* y, std::size_t n) {
    constexpr std::size_t kGroup = OneBitKernels::kGroup;
    std::array<Scratch, kGroup> scratch;
    std::array<OneBitPlane, kGroup> planes;
    for (std::size_t p = 0; p < cursors.size(); p += kGroup) {
      const auto group = cursors.subspan(p, std::min(kGroup, cursors.size() - p));
      for (std::size_t k = 0; k < group.size(); ++k) planes[k] = group[k].next(n, scratch[k]);
      kernels().one_bit.sum(planes.data(), group.size(), add || p > 0, y, n);
    }
  }
};

}  // namespace

std::shared_ptr<const Codec> make_onebit(Parameters& parameters) {
  const std::size_t block = block_of(parameters, kMostBlock);
  return std::make_shared<OneBit>(parameters.canonical(), block);
}

}  // namespace gradwire::codec
