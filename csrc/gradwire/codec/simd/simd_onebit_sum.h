// onebit: what its planes decode to, and their sums (codec/onebit.cc defines the order).
#pragma once

#include "gradwire/codec/simd/simd_signs.h"

namespace gradwire::codec {
namespace {

// A value for each of the sixteen ways that four bits can be.
struct SixteenValues {
  F32 part[16 / kLanes];
};
// Returns part k of a group. The four bits of fours[e % 4] from bit 4 (e / 4) on select the value
// of element e. Each simd_<isa>.cc defines this.
F32 look_up(const SixteenValues& values, const std::uint32_t* fours, std::size_t k);

// A plane in registers.
struct PlaneValues {
  const std::byte* signs;
  const std::byte* present;
  F32 plus, minus;

  static PlaneValues of(const OneBitPlane& plane) {
    return {plane.signs, plane.present, F32{} + plane.plus, F32{} + plane.minus};
  }

  template <bool kMasked, typename PartOf>
  Group load(std::size_t i, PartOf part) const {
    const std::uint32_t sign = load_word(signs, i, part);
    std::uint32_t shown = 0xFFFFFFFFU;
    if (kMasked && present != nullptr) shown = load_word(present, i, part);
    Group y;
    each_part([&](std::size_t k) {
      y[k] = by_bits(sign, k, plus, minus);
      if constexpr (kMasked) y[k] = by_bits(shown, k, F32{}, y[k]);
    });
    return y;
  }
};

// Planes that are added up, for each element in their order.
template <std::size_t kCount, bool kMasked>
struct AddedPlanes {
  PlaneValues values[kCount];

  explicit AddedPlanes(const OneBitPlane* planes) {
    each_of<kCount>([&](std::size_t p) { values[p] = PlaneValues::of(planes[p]); });
  }

  template <typename PartOf>
  Group operator()(std::size_t i, PartOf part) const {
    Group sum = values[0].template load<kMasked>(i, part);
    each_of<kCount - 1>([&](std::size_t p) {
      const Group next = values[p + 1].template load<kMasked>(i, part);
      each_part([&](std::size_t k) { sum[k] = sum[k] + next[k]; });
    });
    return sum;
  }
};

// Bytes of a plane, in words.
struct SignWords {
  using V = U32;
  static constexpr std::size_t kCount = sizeof(U32);
  static constexpr std::size_t kBytes = 1;
  static V load(const std::byte* p) { return get<U32>(p); }
};

// Collects in a the masked bits of a and, `by` bits higher, of b; and in b the bits of both that
// lie `by` further on.
void exchange(U32& a, U32& b, int by, std::uint32_t mask) {
  const U32 low = (a & mask) | ((b & mask) << by);
  b = ((a >> by) & mask) | (b & ~mask);
  a = low;
}

// Interleaves units of kWidth lanes of a and b, taken from the low or the high half of each four
// lanes.
template <std::size_t kWidth, bool kHigh, std::size_t... lane>
U32 zipped(U32 a, U32 b, std::index_sequence<lane...>) {
  return __builtin_shufflevector(a, b,
                                 (lane / 4 * 4 + lane % 4 / kWidth / 2 * kWidth + (kHigh ? 2 : 0) +
                                  lane % kWidth + lane / kWidth % 2 * kLanes)...);
}
template <std::size_t kWidth>
void zip(U32& a, U32& b) {
  constexpr std::make_index_sequence<kLanes> kEach;
  const U32 low = zipped<kWidth, false>(a, b, kEach);
  b = zipped<kWidth, true>(a, b, kEach);
  a = low;
}

// Four planes as four words per group, as look_up() takes them: a 4 x 4 transpose of bits and, for
// vectors, one of lanes.
class SignsOfFour {
 public:
  static constexpr std::size_t kMost = 1024;        // elements
  static constexpr std::size_t kQuad = 4 * kGroup;  // elements that lie in the same four rows
  static constexpr std::size_t kNext = kLanes > 4 ? kLanes : 4;  // words from one group to the next

  template <std::size_t kCount>
  void take(const std::byte* const (&signs)[kCount], std::size_t begin, std::size_t n) {
    sweep<SignWords::kCount>(OneBitKernels::bytes_of_bits(n), [&](std::size_t i, auto part) {
      U32 row[4] = {};
      each_of<kCount>(
          [&](std::size_t p) { row[p] = load<SignWords>(signs[p] + begin / 8, i, part); });
      transpose(row);
      each_of<4>([&](std::size_t p) {
        __builtin_memcpy(words_ + i + p * kLanes, &row[p], sizeof row[p]);
      });
    });
  }
  // Returns the sign words of the first group of the quad that begins at element i.
  const std::uint32_t* quad(std::size_t i) const {
    const std::size_t group = i / kGroup;
    return words_ + group / kNext * 4 * kNext + group % kNext;
  }

 private:
  static void transpose(U32 (&row)[4]) {
    exchange(row[0], row[2], 2, 0x33333333U);
    exchange(row[1], row[3], 2, 0x33333333U);
    exchange(row[0], row[1], 1, 0x55555555U);
    exchange(row[2], row[3], 1, 0x55555555U);
    if constexpr (kLanes > 1) {
      zip<1>(row[0], row[1]);
      zip<1>(row[2], row[3]);
      zip<2>(row[0], row[2]);
      zip<2>(row[1], row[3]);
      const U32 second = row[2];
      row[2] = row[1];
      row[1] = second;
    }
  }

  alignas(64) std::uint32_t words_[kMost / 8];
};

// Makes the same sums where no plane has a mask: each possible sum is computed once.
template <std::size_t kCount>
struct TabulatedPlanes {
  const std::byte* signs[kCount];
  SixteenValues sums;

  explicit TabulatedPlanes(const OneBitPlane* planes) {
    each_of<kCount>([&](std::size_t p) { signs[p] = planes[p].signs; });
    each_of<16 / kLanes>([&](std::size_t k) { sums.part[k] = sums_of(planes, k); });
  }

  static F32 sums_of(const OneBitPlane* planes, std::size_t k) {
    constexpr std::uint32_t kBitOfNumber[4] = {0xAAAA, 0xCCCC, 0xF0F0, 0xFF00};
    const auto value = [&](std::size_t p) {
      return by_bits(kBitOfNumber[p], k, F32{} + planes[p].plus, F32{} + planes[p].minus);
    };
    F32 sum = value(0);
    each_of<kCount - 1>([&](std::size_t p) { sum = sum + value(p + 1); });
    return sum;
  }
};

// Notes whether any value that it sees may be NaN: then the sum of all is.
class NanCheck {
 public:
  void see(const Group& v) {
    each_part([&](std::size_t k) { sums_[k] = sums_[k] + v[k]; });
  }
  bool may_hold() const {
    Group nans;
    each_part([&](std::size_t k) { nans[k] = sums_[k] == sums_[k] ? F32{} : -F32{}; });
    return word_of(nans) != 0;
  }

 private:
  Group sums_{};
};

template <bool kAdd, typename SumAt>
[[gnu::always_inline]] inline void store_sums(SumAt sum_at, float* y, std::size_t n,
                                              NanCheck& check) {
  sweep<kGroup>(n, [=, &check](std::size_t i, auto part) {
    Group sum = sum_at(i, part);
    if constexpr (kAdd) {
      const Group before = load<Groups>(y, i, part);
      each_part([&](std::size_t k) { sum[k] = before[k] + sum[k]; });
    }
    check.see(sum);
    store<Groups>(y, i, part, sum);
  });
}

template <bool kAdd, std::size_t kCount, bool kMasked>
[[gnu::flatten]] void sum_planes(AddedPlanes<kCount, kMasked> planes, float* y, std::size_t n) {
  NanCheck check;
  store_sums<kAdd>(planes, y, n, check);
  if (check.may_hold()) make_canonical(y, n);
}

template <bool kAdd, std::size_t kCount>
[[gnu::flatten]] void sum_planes(const TabulatedPlanes<kCount>& planes, float* y, std::size_t n) {
  SignsOfFour signs;
  NanCheck check;
  const auto least = [](std::size_t a, std::size_t b) { return a < b ? a : b; };
  for (std::size_t begin = 0; begin < n; begin += SignsOfFour::kMost) {
    const std::size_t length = least(n - begin, SignsOfFour::kMost);
    signs.take(planes.signs, begin, length);
    for (std::size_t i = 0; i < length; i += SignsOfFour::kQuad) {
      const auto sum_at = [quad = signs.quad(i), sums = planes.sums](std::size_t at, auto) {
        Group sum;
        each_part([&](std::size_t k) {
          sum[k] = look_up(sums, quad + at / kGroup * SignsOfFour::kNext, k);
        });
        return sum;
      };
      store_sums<kAdd>(sum_at, y + begin + i, least(length - i, SignsOfFour::kQuad), check);
    }
  }
  if (check.may_hold()) make_canonical(y, n);
}

template <typename Planes>
void sum_planes(const OneBitPlane* planes, bool add, float* y, std::size_t n) {
  if (add)
    sum_planes<true>(Planes(planes), y, n);
  else
    sum_planes<false>(Planes(planes), y, n);
}

template <std::size_t kCount>
void sum_of(const OneBitPlane* planes, bool add, float* y, std::size_t n) {
  bool masked = false;
  for (std::size_t p = 0; p < kCount; ++p) masked = masked || planes[p].present != nullptr;
  if (masked) return sum_planes<AddedPlanes<kCount, true>>(planes, add, y, n);
  if constexpr (kCount == 1)
    sum_planes<AddedPlanes<1, false>>(planes, add, y, n);
  else
    sum_planes<TabulatedPlanes<kCount>>(planes, add, y, n);
}

void sum_onebit(const OneBitPlane* planes, std::size_t count, bool add, float* y,
                std::size_t n) noexcept {
  if (count == 1) return sum_of<1>(planes, add, y, n);
  if (count == 2) return sum_of<2>(planes, add, y, n);
  if (count == 3) return sum_of<3>(planes, add, y, n);
  sum_of<4>(planes, add, y, n);
}

}  // namespace
}  // namespace gradwire::codec
