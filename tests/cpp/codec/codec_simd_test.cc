#include "gradwire/codec/simd/simd.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <set>
#include <utility>
#include <vector>

#include "codec_reference.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/simd/float_modes.h"

namespace gradwire::codec {
namespace codec_simd_test {

constexpr std::size_t kGuard = 64;  // bytes around each array that no kernel may touch

const Kernels& scalar() { return *available_kernels().back(); }

std::vector<std::size_t> lengths() {
  std::vector<std::size_t> all;
  for (std::size_t n = 0; n <= 140; ++n) all.push_back(n);
  all.insert(all.end(), {255, 257, 1023, 4099});
  return all;
}

// An array somewhere in memory: n elements that start `offset` bytes into their guard.
class Array {
 public:
  Array(std::size_t bytes, std::size_t offset) : bytes_(2 * kGuard + bytes), offset_(offset) {}
  std::byte* data() { return bytes_.data() + offset_; }
  float* floats() { return reinterpret_cast<float*>(data()); }
  bool operator==(const Array&) const = default;

 private:
  std::vector<std::byte> bytes_;
  std::size_t offset_;
};

class Differential : public testing::Test {
 protected:
  std::size_t any_offset() { return random_() % kGuard; }
  std::size_t float_offset() { return any_offset() / 4 * 4; }

  Array elements(DType dtype, std::size_t n, Data data) {
    Array array(n * size_of(dtype), any_offset());
    std::ranges::copy(draw_elements(dtype, n, data, random_), array.data());
    return array;
  }

  Array floats(std::size_t n, Data data) {
    Array array(n * sizeof(float), float_offset());
    for (std::size_t i = 0; i < n; ++i) array.floats()[i] = draw_float(data, random_);
    return array;
  }

  Array payload(std::size_t n) { return elements(DType::kFloat16, n, Data::kRandomBits); }

  template <typename Codec>
  void expect_encoded_alike(Codec Kernels::* codec, std::size_t even, std::size_t odd);
  template <typename Decode>
  void expect_decoded_alike(Array in, std::size_t n, Data data, const Decode& decode);

  std::mt19937_64 random_{1};
};

TEST_F(Differential, EveryTableReducesLikeScalar) {
  for (const Kernels* table : available_kernels())
    for (std::size_t d = 0; d < kDTypes; ++d)
      for (std::size_t op = 0; op < kReduceOps; ++op)
        for (Data data : kAllData)
          for (std::size_t n : lengths()) {
            const auto dtype = static_cast<DType>(d);
            Array expected = elements(dtype, n, data), x = elements(dtype, n, data);
            Array actual = expected;
            ASSERT_EQ(table->reduce[d][op] != nullptr,
                      is_defined(static_cast<ReduceOp>(op), dtype));
            if (table->reduce[d][op] == nullptr) continue;
            scalar().reduce[d][op](expected.data(), x.data(), n);
            table->reduce[d][op](actual.data(), x.data(), n);
            ASSERT_EQ(actual, expected) << table->name << " " << name_of(dtype) << " "
                                        << name_of(static_cast<ReduceOp>(op)) << " n=" << n;
          }
}

TEST_F(Differential, EveryTableReducesAnArrayIntoItself) {
  for (const Kernels* table : available_kernels())
    for (std::size_t d = 0; d < kDTypes; ++d)
      for (std::size_t op = 0; op < kReduceOps; ++op) {
        Array copy = elements(static_cast<DType>(d), 99, Data::kRandomBits);
        Array expected = copy, actual = copy;
        if (table->reduce[d][op] == nullptr) continue;
        scalar().reduce[d][op](expected.data(), copy.data(), 99);
        table->reduce[d][op](actual.data(), actual.data(), 99);
        ASSERT_EQ(actual, expected) << table->name << " dtype " << d << " op " << op;
      }
}

TEST_F(Differential, EveryTableScalesLikeScalar) {
  for (const Kernels* table : available_kernels())
    for (std::size_t d = 0; d < kDTypes; ++d)
      for (double factor : {1.0 / 3, 0.125, -7e4, 0.0})
        for (std::size_t n : lengths()) {
          if (scalar().scale[d] == nullptr) continue;
          Array expected = elements(static_cast<DType>(d), n, Data::kRandomBits);
          Array actual = expected;
          scalar().scale[d](expected.data(), factor, n);
          table->scale[d](actual.data(), factor, n);
          ASSERT_EQ(actual, expected) << table->name << " dtype " << d << " by " << factor;
        }
}

template <typename T>
std::vector<T> folded(DType dtype, ReduceOp op, std::vector<T> acc, const std::vector<T>& x) {
  kernels().reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)](
      acc.data(), x.data(), x.size());
  return acc;
}

TEST(Reduce, BoolsAreTrueWhereTheyAreNotZero) {
  const std::vector<std::uint8_t> a = {0, 0, 1, 2, 255}, b = {0, 4, 0, 1, 2};
  const std::vector<std::uint8_t> some = {0, 1, 1, 1, 1}, every = {0, 0, 0, 1, 1};
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor, ReduceOp::kLor})
    EXPECT_EQ(folded(DType::kBool, op, a, b), some) << name_of(op);
  for (ReduceOp op : {ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kBand, ReduceOp::kLand})
    EXPECT_EQ(folded(DType::kBool, op, a, b), every) << name_of(op);
  for (ReduceOp op : {ReduceOp::kBxor, ReduceOp::kLxor})
    EXPECT_EQ(folded(DType::kBool, op, a, b), (std::vector<std::uint8_t>{0, 1, 1, 0, 0}));
}

TEST(Reduce, BitwiseAndLogicalOps) {
  const std::vector<std::int16_t> a = {0, -1, 0x0F0, 5}, b = {0, 0x123, 0x3C0, 0};
  const auto of = [&](ReduceOp op) { return folded(DType::kInt16, op, a, b); };
  EXPECT_EQ(of(ReduceOp::kBand), (std::vector<std::int16_t>{0, 0x123, 0x0C0, 0}));
  EXPECT_EQ(of(ReduceOp::kBor), (std::vector<std::int16_t>{0, -1, 0x3F0, 5}));
  EXPECT_EQ(of(ReduceOp::kBxor), (std::vector<std::int16_t>{0, ~0x123, 0x330, 5}));
  EXPECT_EQ(of(ReduceOp::kLand), (std::vector<std::int16_t>{0, 1, 1, 0}));
  EXPECT_EQ(of(ReduceOp::kLor), (std::vector<std::int16_t>{0, 1, 1, 1}));
  EXPECT_EQ(of(ReduceOp::kLxor), (std::vector<std::int16_t>{0, 0, 0, 1}));
}

TEST(Reduce, UnsignedIntegersWrapAndCompareAsSuch) {
  const std::vector<std::uint16_t> a = {65535, 40000}, b = {65535, 2};
  EXPECT_EQ(folded(DType::kUInt16, ReduceOp::kProd, a, b), (std::vector<std::uint16_t>{1, 14464}));
  EXPECT_EQ(folded(DType::kUInt16, ReduceOp::kMax, a, b), a);
  EXPECT_EQ(folded(DType::kInt16, ReduceOp::kMax, a, b), (std::vector<std::uint16_t>{65535, 2}));
}

TEST_F(Differential, EveryTableFoldsWideLikeScalar) {
  using Wide = WideKernels WideTable::*;
  for (const Kernels* table : available_kernels())
    for (const auto& [wide, dtype] : {std::pair<Wide, DType>{&WideTable::fp16_sum, DType::kFloat16},
                                      {&WideTable::fp16_prod, DType::kFloat16},
                                      {&WideTable::bf16_sum, DType::kBFloat16},
                                      {&WideTable::bf16_prod, DType::kBFloat16}})
      for (Data data : kAllData)
        for (std::size_t n : lengths()) {
          Array a = elements(dtype, n, data), b = elements(dtype, n, data);
          Array sum = floats(n, data), same_sum = sum, y = elements(dtype, n, data), same_y = y;
          const auto run = [&](const WideKernels& of, Array& into, Array& rounded) {
            of.begin(a.data(), b.data(), into.floats(), n);
            of.fold(into.floats(), a.data(), n);
            of.round(into.floats(), 1.0F / 3, rounded.data(), n);
          };
          run(scalar().wide.*wide, sum, y);
          run(table->wide.*wide, same_sum, same_y);
          ASSERT_EQ(same_sum, sum) << table->name << " n=" << n;
          ASSERT_EQ(same_y, y) << table->name << " n=" << n;
        }
}

TEST_F(Differential, EveryTableFindsNanAndInfLikeScalar) {
  for (const Kernels* table : available_kernels())
    for (Data data : kAllData)
      for (std::size_t n : lengths()) {
        Array x = floats(n, data);
        ASSERT_EQ(table->finite(x.floats(), n), scalar().finite(x.floats(), n)) << table->name;
        if (n == 0 || data != Data::kHuge) continue;
        ASSERT_TRUE(table->finite(x.floats(), n)) << table->name << " n=" << n;
        for (float bad : {INFINITY, -INFINITY, NAN, -NAN}) {
          float& one = x.floats()[random_() % n];
          const float before = std::exchange(one, bad);
          ASSERT_FALSE(table->finite(x.floats(), n)) << table->name << " n=" << n;
          one = before;
        }
      }
}

TEST_F(Differential, EveryTableCastsLikeScalar) {
  for (const Kernels* table : available_kernels())
    for (CastKernels Kernels::* cast : {&Kernels::fp16, &Kernels::bf16})
      for (float scale : {1.0F, 1024.0F, 0x1p-100F})
        for (Data data : kAllData)
          for (std::size_t n : lengths()) {
            const CastKernels& reference = scalar().*cast;
            const CastKernels& tested = table->*cast;
            Array x = floats(n, data), in = payload(n);

            Array plain = payload(n), plain_actual = plain;
            reference.encode(x.floats(), nullptr, scale, plain.data(), nullptr, n);
            tested.encode(x.floats(), nullptr, scale, plain_actual.data(), nullptr, n);
            ASSERT_EQ(plain_actual, plain) << table->name << " n=" << n;

            Array residual = floats(n, data);
            for (const float* each : std::array<const float*, 2>{nullptr, residual.floats()}) {
              Array out = payload(n), out_actual = out;
              Array error = floats(n, Data::kNormal), error_actual = error;
              reference.encode(x.floats(), each, scale, out.data(), error.floats(), n);
              tested.encode(x.floats(), each, scale, out_actual.data(), error_actual.floats(), n);
              ASSERT_EQ(out_actual, out) << table->name << " n=" << n;
              ASSERT_EQ(error_actual, error) << table->name << " n=" << n;
            }

            Array y = floats(n, data), y_actual = y;
            ASSERT_EQ(tested.decode_add(in.data(), scale, y_actual.floats(), n),
                      reference.decode_add(in.data(), scale, y.floats(), n))
                << table->name << " n=" << n;
            ASSERT_EQ(y_actual, y) << table->name << " n=" << n;

            ASSERT_EQ(tested.decode(in.data(), scale, y_actual.floats(), n),
                      reference.decode(in.data(), scale, y.floats(), n))
                << table->name << " n=" << n;
            ASSERT_EQ(y_actual, y) << table->name << " n=" << n;
          }
}

TEST_F(Differential, EveryTableRoundsAtRandomLikeScalar) {
  for (const Kernels* table : available_kernels())
    for (const std::uint64_t element : {0, 4096, 4095, 123})
      for (std::size_t n : lengths()) {
        const RandomPosition position{.seed = 3, .call = 9, .element = element};
        Array x = floats(n, Data::kNormal);
        Array out = elements(DType::kBFloat16, n, Data::kNormal), same = out;
        scalar().bf16_at_random(x.floats(), position, out.data(), n);
        table->bf16_at_random(x.floats(), position, same.data(), n);
        ASSERT_EQ(same, out) << table->name << " n=" << n;
      }
}

// int8 or int4, in blocks of either size.
template <typename Codec>
void Differential::expect_encoded_alike(Codec Kernels::* codec, std::size_t even, std::size_t odd) {
  const RandomPosition position{.seed = 3, .call = 9, .element = 640};
  const Codec& reference = scalar().*codec;
  for (const Kernels* table : available_kernels())
    for (const RandomPosition* drawn : {static_cast<const RandomPosition*>(nullptr), &position})
      for (Data data : kAllData)
        for (std::size_t n : lengths())
          for (bool fed_back : {false, true}) {
            const std::size_t block = n % 2 == 0 ? even : odd;
            const auto encode = (table->*codec).encode;
            Array x = floats(n, data), residual = floats(n, Data::kNormal);
            const float* e = fed_back ? residual.floats() : nullptr;
            Array out = elements(DType::kUInt8, Codec::bytes(n, block), data), same = out;
            Array error = floats(n, Data::kNormal), same_error = error;
            reference.encode(x.floats(), e, n, block, drawn, out.data(), error.floats());
            encode(x.floats(), e, n, block, drawn, same.data(), same_error.floats());
            ASSERT_EQ(same, out) << table->name << " n=" << n;
            ASSERT_EQ(same_error, error) << table->name << " n=" << n;
            encode(x.floats(), e, n, block, drawn, same.data(), nullptr);
            ASSERT_EQ(same, out) << table->name << " n=" << n;
          }
}

TEST_F(Differential, EveryTableEncodesIntegersLikeScalar) {
  expect_encoded_alike(&Kernels::int8, 1024, 64);
  expect_encoded_alike(&Kernels::int4, 32, 64);
}

// decode(table, add, in, y) writes to y, and returns whether all is finite.
template <typename Decode>
void Differential::expect_decoded_alike(Array in, std::size_t n, Data data, const Decode& decode) {
  for (const Kernels* table : available_kernels()) {
    Array y = floats(n, data), same = y;
    for (bool add : {true, false}) {
      ASSERT_EQ(decode(*table, add, in.data(), same.floats()),
                decode(scalar(), add, in.data(), y.floats()));
      ASSERT_EQ(same, y) << table->name << " n=" << n;
    }
  }
}

TEST_F(Differential, EveryTableDecodesInt8LikeScalar) {
  for (Data data : kAllData)
    for (std::size_t n : lengths()) {
      Array in = elements(DType::kUInt8, Int8Kernels::bytes(n, 64), data);
      for (std::size_t i = 0; i < n; i += 64) {
        const float scale = draw_float(i == 0 ? data : Data::kNormal, random_);
        std::memcpy(in.data() + i / 64 * 68, &scale, sizeof scale);
      }
      expect_decoded_alike(in, n, data, [n](const Kernels& of, bool add, auto* from, float* y) {
        return (add ? of.int8.decode_add : of.int8.decode)(from, n, 64, y);
      });
    }
}

// Scales of any bits: some are Inf or NaN.
TEST_F(Differential, EveryTableDecodesInt4LikeScalar) {
  for (const auto* levels : {&Int4Kernels::kNearest, &Int4Kernels::kEqual})
    for (Data data : kAllData)
      for (std::size_t n : lengths()) {
        const Array in = elements(DType::kUInt8, Int4Kernels::bytes(n, 32), data);
        const auto decode = [=](const Kernels& of, bool add, auto* from, float* y) {
          return (add ? of.int4.decode_add : of.int4.decode)(from, n, 32, *levels, y);
        };
        expect_decoded_alike(in, n, data, decode);
      }
}

TEST_F(Differential, EveryTableEncodesOneBitLikeScalar) {
  const OneBitKernels& reference = scalar().one_bit;
  for (const Kernels* table : available_kernels())
    for (std::uint64_t nonzero : {64, 32, 3})  // of 64
      for (Data data : kAllData)
        for (std::size_t n : lengths())
          for (bool fed_back : {false, true}) {
            const std::size_t block = n % 2 == 0 ? 1024 : 64;
            Array x = floats(n, data), residual = floats(n, Data::kNormal);
            for (std::size_t i = 0; i < n; ++i)
              if (random_() % 64 >= nonzero) x.floats()[i] = residual.floats()[i] = 0;
            const float* e = fed_back ? residual.floats() : nullptr;
            Array out = elements(DType::kUInt8, (n / block + 1) * OneBitKernels::most_bytes(block),
                                 Data::kNormal);
            Array same = out, error = floats(n, Data::kNormal), same_error = error;
            reference.encode(x.floats(), e, n, block, out.data(), error.floats());
            table->one_bit.encode(x.floats(), e, n, block, same.data(), same_error.floats());
            ASSERT_EQ(same, out) << table->name << " n=" << n;
            ASSERT_EQ(same_error, error) << table->name << " n=" << n;
            table->one_bit.encode(x.floats(), e, n, block, same.data(), nullptr);
            ASSERT_EQ(same, out) << table->name << " n=" << n;
          }
}

TEST_F(Differential, EveryTableSumsOneBitLikeScalar) {
  for (const Kernels* table : available_kernels())
    for (Data data : kAllData)
      for (std::size_t n : lengths())
        for (std::size_t count = 1; count <= OneBitKernels::kGroup; ++count)
          for (bool add : {false, true}) {
            const std::size_t size = OneBitKernels::bytes_of_bits(n);
            std::vector<Array> signs, present;
            std::vector<OneBitPlane> planes;
            for (std::size_t p = 0; p < count; ++p) {
              signs.push_back(elements(DType::kUInt8, size, data));
              present.push_back(elements(DType::kUInt8, size, data));
              const bool masked = (n + p) % 5 == 0;
              planes.push_back({signs[p].data(), masked ? present[p].data() : nullptr,
                                draw_float(data, random_), draw_float(data, random_)});
            }
            Array y = floats(n, data), same = y;
            scalar().one_bit.sum(planes.data(), count, add, y.floats(), n);
            table->one_bit.sum(planes.data(), count, add, same.floats(), n);
            ASSERT_EQ(same, y) << table->name << " n=" << n;
          }
}

TEST_F(Differential, EveryTableExpandsBitsLikeScalar) {
  for (const Kernels* table : available_kernels())
    for (std::size_t n : lengths()) {
      const std::size_t size = OneBitKernels::bytes_of_bits(n);
      Array packed = elements(DType::kUInt8, size, Data::kNormal);
      Array mask = elements(DType::kUInt8, size, Data::kNormal);
      Array bits = elements(DType::kUInt8, size, Data::kNormal), same = bits;
      scalar().one_bit.expand(packed.data(), size, mask.data(), n, bits.data());
      table->one_bit.expand(packed.data(), size, mask.data(), n, same.data());
      ASSERT_EQ(same, bits) << table->name << " n=" << n;
    }
}

// Runs of a block that is encoded, and any bytes.
TEST_F(Differential, EveryTableReadsRunsLikeScalar) {
  constexpr std::size_t kHeader = 2 * sizeof(float);
  std::size_t read = 0;
  for (const Kernels* table : available_kernels())
    for (std::size_t n : lengths())
      for (std::size_t longest : {1, 9, 200, 5000}) {
        if (n == 0) continue;
        Array x = floats(n, Data::kNormal);
        for (std::size_t i = 0; i < n; i += 1 + random_() % longest)
          std::fill(x.floats() + i, x.floats() + std::min(n, i + random_() % longest), 0.0F);
        Array in = elements(DType::kUInt8, OneBitKernels::most_bytes(n), Data::kNormal);
        if (longest > 1) scalar().one_bit.encode(x.floats(), nullptr, n, n, in.data(), nullptr);
        const std::size_t available = OneBitKernels::most_bytes(n) - kHeader;
        Array mask = elements(DType::kUInt8, OneBitKernels::bytes_of_bits(n), Data::kNormal);
        Array same = mask;
        const std::byte* runs = in.data() + kHeader;
        const std::size_t size = scalar().one_bit.read_runs(runs, available, n, mask.data());
        ASSERT_EQ(table->one_bit.read_runs(runs, available, n, same.data()), size);
        ASSERT_EQ(same, mask) << table->name << " n=" << n;
        read += size > 0;
      }
  EXPECT_GT(read, 100U);
}

double expected_value(ReduceOp op, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  const bool a_first = a < b || (a == b && std::signbit(a));
  switch (op) {
    case ReduceOp::kMin:
      return a_first ? a : b;
    case ReduceOp::kMax:
      return a_first ? b : a;
    case ReduceOp::kProd:
      return a * b;
    default:
      return a + b;
  }
}

// Against the definition, in float64: it rounds twice, which is harmless for up to 25 digits.
TEST_F(Differential, ScalarFollowsIeee754) {
  constexpr std::size_t kCount = 20000;
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const Format& format = *format_of(dtype);
    const std::size_t size = size_of(dtype);
    for (Data data : kAllData)
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProd}) {
        const bool twice_rounded = op == ReduceOp::kProd && dtype == DType::kBFloat16;
        Array a = elements(dtype, kCount, data), b = elements(dtype, kCount, data), sum = a;
        scalar().reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)](
            sum.data(), b.data(), kCount);
        for (std::size_t i = 0; i < kCount; ++i) {
          std::uint64_t left = 0, right = 0, actual = 0;
          std::memcpy(&left, a.data() + i * size, size);
          std::memcpy(&right, b.data() + i * size, size);
          std::memcpy(&actual, sum.data() + i * size, size);
          double value = expected_value(op, format.decode(left), format.decode(right));
          if (twice_rounded) value = static_cast<float>(value);  // "through float32"
          ASSERT_EQ(actual, format.encode(value))
              << name_of(dtype) << " " << name_of(op) << " of " << left << " and " << right;
        }
      }
  }
}

template <typename T>
std::vector<T> reduced(DType dtype, ReduceOp op, std::vector<T> a, const std::vector<T>& b) {
  kernels().reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)](
      a.data(), b.data(), a.size());
  return a;
}

TEST(Reduce, IntegersWrapAndCompareWithTheirSign) {
  using I8 = std::vector<std::int8_t>;
  const I8 a = {127, -128, -1, 100}, b = {1, -1, 1, 3};
  EXPECT_EQ(reduced(DType::kInt8, ReduceOp::kSum, a, b), (I8{-128, 127, 0, 103}));
  EXPECT_EQ(reduced(DType::kInt8, ReduceOp::kProd, a, b), (I8{127, -128, -1, 44}));
  EXPECT_EQ(reduced(DType::kInt8, ReduceOp::kMin, a, b), (I8{1, -128, -1, 3}));
  EXPECT_EQ(reduced(DType::kInt8, ReduceOp::kMax, a, b), (I8{127, -1, 1, 100}));

  using U8 = std::vector<std::uint8_t>;
  EXPECT_EQ(reduced(DType::kUInt8, ReduceOp::kMax, U8{255, 1}, U8{1, 128}), (U8{255, 128}));

  using I64 = std::vector<std::int64_t>;
  const std::int64_t least = std::numeric_limits<std::int64_t>::min();
  EXPECT_EQ(reduced(DType::kInt64, ReduceOp::kSum, I64{least, 5}, I64{-1, -7}),
            (I64{std::numeric_limits<std::int64_t>::max(), -2}));
  EXPECT_EQ(reduced(DType::kInt64, ReduceOp::kProd, I64{least, 1LL << 40}, I64{-1, 3}),
            (I64{least, 3LL << 40}));

  using I32 = std::vector<std::int32_t>;
  EXPECT_EQ(reduced(DType::kInt32, ReduceOp::kMin, I32{-5, 5}, I32{3, 3}), (I32{-5, 3}));
}

TEST(Reduce, Float64NanAndZerosAsThe2019StandardSays) {
  using F64 = std::vector<double>;
  const double nan = std::bit_cast<double>(0xFFF0000000000123ULL);
  const F64 a = {nan, 1, -0.0, 0.0, 2}, b = {1, nan, 0.0, -0.0, 3};
  const auto least = reduced(DType::kFloat64, ReduceOp::kMin, a, b);
  const auto most = reduced(DType::kFloat64, ReduceOp::kMax, a, b);
  for (std::size_t i : {0, 1}) {
    EXPECT_EQ(std::bit_cast<std::uint64_t>(least[i]), kFloat64Format.quiet_nan());
    EXPECT_EQ(std::bit_cast<std::uint64_t>(most[i]), kFloat64Format.quiet_nan());
  }
  for (std::size_t i : {2, 3}) {
    EXPECT_TRUE(std::signbit(least[i]));
    EXPECT_FALSE(std::signbit(most[i]));
  }
  EXPECT_EQ(least[4], 2);
  EXPECT_EQ(most[4], 3);
}

TEST(Scale, RoundsTheFactorToFloat32ExceptForFloat64) {
  std::vector<float> single = {3, 7, 1e-3F};
  std::vector<double> wide = {3, 7, 1e-3};
  kernels().scale[static_cast<std::size_t>(DType::kFloat32)](single.data(), 1.0 / 3, 3);
  kernels().scale[static_cast<std::size_t>(DType::kFloat64)](wide.data(), 1.0 / 3, 3);
  const float third = static_cast<float>(1.0 / 3);
  EXPECT_EQ(single, (std::vector<float>{3 * third, 7 * third, 1e-3F * third}));
  EXPECT_EQ(wide, (std::vector<double>{3 * (1.0 / 3), 7 * (1.0 / 3), 1e-3 * (1.0 / 3)}));
}

constexpr std::uint64_t kFlushAndRoundDown = kFlushModes | kRoundDownModes;

TEST(FloatEnvironment, ShieldsKernelsFromTheCallersModes) {
  const std::uint64_t before = float_modes();
  for (const Kernels* table : available_kernels()) {
    const auto add = table->reduce[0][0];
    const std::vector<float> x = {0x1p-149F, 0x1p-24F + 0x1p-40F};
    std::vector<float> flushed = {0x1p-140F, 1}, kept = flushed;
    set_float_modes(kFlushAndRoundDown);
    add(flushed.data(), x.data(), 2);
    std::uint64_t inside = 0;
    {
      const FloatEnvironment environment;
      inside = float_modes();
      add(kept.data(), x.data(), 2);
    }
    const std::uint64_t after = float_modes();
    set_float_modes(before);
    EXPECT_EQ(inside, kIeeeModes);
    EXPECT_EQ(after & kModeBits, kFlushAndRoundDown);
    EXPECT_EQ(flushed, (std::vector<float>{0, 1})) << "the modes under test had no effect";
    EXPECT_EQ(kept, (std::vector<float>{0x1p-140F + 0x1p-149F, 1 + 0x1p-23F})) << table->name;
  }
}

TEST(Dispatch, ListsDistinctTablesWithScalarLast) {
  std::set<std::string_view> names;
  for (const Kernels* table : available_kernels()) names.insert(table->name);
  EXPECT_EQ(names.size(), available_kernels().size());
  EXPECT_STREQ(scalar().name, "scalar");
}

using Function = void (*)();

// One of each of its parts.
std::vector<Function> functions_of(const Kernels& table) {
  const auto as_function = [](auto each) { return reinterpret_cast<Function>(each); };
  return {as_function(table.reduce[0][0]),
          as_function(table.scale[0]),
          as_function(table.finite),
          as_function(table.fp16.encode),
          as_function(table.bf16.decode_add),
          as_function(table.int8.encode),
          as_function(table.int8.decode_add),
          as_function(table.int4.encode),
          as_function(table.int4.decode_add),
          as_function(table.one_bit.encode),
          as_function(table.one_bit.sum),
          as_function(table.one_bit.expand),
          as_function(table.one_bit.read_runs),
          as_function(table.sparse.threshold),
          as_function(table.sparse.filter),
          as_function(table.lowrank.left),
          as_function(table.lowrank.right),
          as_function(table.lowrank.product)};
}

// What a comparison with scalar compares is another's code.
class Tables : public testing::TestWithParam<const char*> {};

TEST_P(Tables, HasFunctionsOfItsOwn) {
  for (const Kernels* table : available_kernels()) {
    if (std::string_view(table->name) != GetParam()) continue;
    const auto own = functions_of(*table);
    for (const Kernels* other : available_kernels())
      for (std::size_t i = 0; other != table && i < own.size(); ++i)
        EXPECT_NE(functions_of(*other)[i], own[i]) << other->name << " " << i;
    return;
  }
  GTEST_SKIP() << "this processor has no " << GetParam() << ": its kernels are not tested here";
}

INSTANTIATE_TEST_SUITE_P(All, Tables, testing::Values("scalar", "avx2", "avx512"),
                         [](const auto& each) { return std::string(each.param); });

// Run in a process of its own: the choice is made once.
[[noreturn]] void print_active(const char* wanted) {
  setenv("GRADWIRE_SIMD", wanted, 1);
  try {
    std::cerr << "active=" << kernels().name << "." << std::endl;
  } catch (const InvalidArgument& error) {
    std::cerr << "refused: " << error.what() << std::endl;
  }
  std::exit(0);
}

TEST(DispatchDeathTest, EnvironmentNamesTheTable) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const Kernels* table : available_kernels())
    EXPECT_EXIT(print_active(table->name), testing::ExitedWithCode(0),
                std::string("active=") + table->name + "\\.");
  EXPECT_EXIT(print_active("neon"), testing::ExitedWithCode(0), "refused: .*'neon'.*scalar");
  EXPECT_EXIT(print_active(""), testing::ExitedWithCode(0),
              std::string("active=") + available_kernels().front()->name + "\\.");
}

}  // namespace codec_simd_test
}  // namespace gradwire::codec
