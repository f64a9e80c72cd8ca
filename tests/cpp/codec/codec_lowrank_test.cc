#include "gradwire/codec/lowrank.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "codec_reference.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {
namespace codec_lowrank_test {

using Values = std::vector<float>;

constexpr float kLargest = std::numeric_limits<float>::max();
constexpr std::size_t kGuard = 16;  // floats around each array that no kernel may touch
constexpr float kGuardValue = 12345;

// An array at any alignment of floats, between guards.
class Guarded {
 public:
  explicit Guarded(const Values& values, std::size_t shift = 1) : shift_(shift) {
    all_.assign(values.size() + 2 * kGuard, kGuardValue);
    std::ranges::copy(values, data());
  }
  float* data() { return all_.data() + shift_; }
  Values values() {
    const Values inner(data(), data() + size());
    EXPECT_EQ(std::ranges::count(all_, kGuardValue) - std::ranges::count(inner, kGuardValue),
              2 * kGuard);
    return inner;
  }

 private:
  std::size_t size() const { return all_.size() - 2 * kGuard; }
  std::size_t shift_;
  Values all_;
};

Values random_values(std::size_t n, Data data, unsigned seed) {
  std::mt19937_64 random(seed);
  Values x(n);
  for (float& value : x) value = draw_float(data, random);
  return x;
}

std::vector<std::uint32_t> bits(const Values& values) {
  std::vector<std::uint32_t> all;
  for (float each : values) all.push_back(std::bit_cast<std::uint32_t>(each));
  return all;
}

bool all_finite(const Values& x) { return kernels().finite(x.data(), x.size()); }

// ---- The definitions of codec/factors.h, word by word ------------------------------------------

Values left_by_definition(const Values& v, const Values& q, const Factors& of) {
  Values p;
  for (std::size_t k = 0; k < of.rank; ++k)
    for (std::size_t i = 0; i < of.rows; ++i) {
      float lanes[16] = {};
      for (std::size_t j = 0; j < of.columns; ++j) {
        const float product = v[i * of.columns + j] * q[k * of.columns + j];
        lanes[j % 16] += product;
      }
      for (std::size_t w : {8, 4, 2, 1})
        for (std::size_t l = 0; l < w; ++l) lanes[l] += lanes[l + w];
      p.push_back(lanes[0]);
    }
  return p;
}

Values right_by_definition(const Values& v, const Values& p, const Factors& of) {
  Values q;
  for (std::size_t k = 0; k < of.rank; ++k)
    for (std::size_t j = 0; j < of.columns; ++j) {
      float whole = 0;
      for (std::size_t first = 0; first < of.rows; first += 8) {
        float block = 0;
        for (std::size_t i = first; i < std::min(first + 8, of.rows); ++i) {
          const float factor = p[k * of.rows + i] * kHeadroom;
          block += v[i * of.columns + j] * factor;
        }
        whole += block;
      }
      q.push_back(whole);
    }
  return q;
}

Values product_by_definition(const Values& p, const Values& q, float scale, const Factors& of) {
  Values y;
  for (std::size_t i = 0; i < of.rows; ++i)
    for (std::size_t j = 0; j < of.columns; ++j) {
      float sum = 0;
      for (std::size_t k = 0; k < of.rank; ++k) sum += q[k * of.columns + j] * p[k * of.rows + i];
      y.push_back(std::clamp(sum * scale, -kLargest, kLargest));
    }
  return y;
}

struct Case {
  Factors of;
  Data data;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (Data data : {Data::kNormal, Data::kHuge, Data::kDenormal}) {
    for (std::size_t rows : {1, 2, 4, 7, 8, 9, 16, 17})
      for (std::size_t columns : {1, 2, 15, 16, 17, 31, 33, 64, 79})
        for (std::size_t rank : {1, 2, 3, 4, 5, 8}) all.push_back({{rows, columns, rank}, data});
    all.push_back({{5, 1045, 6}, data});  // several blocks of columns
    all.push_back({{13, 514, 4}, data});
    all.push_back({{40, 40, kMostRank}, data});
  }
  return all;
}

class EveryTable : public testing::TestWithParam<const Kernels*> {
 protected:
  const LowRankKernels& table() const { return GetParam()->lowrank; }
};

std::string text_of(const Case& each) {
  return std::to_string(each.of.rows) + "x" + std::to_string(each.of.columns) + " rank " +
         std::to_string(each.of.rank) + " data " + std::to_string(static_cast<int>(each.data));
}

Values tiny(Values values) {
  for (float& each : values) each *= kHeadroom;
  return values;
}

TEST_P(EveryTable, FindsTheLeftFactorAsDefined) {
  for (const Case& each : cases()) {
    const Factors& of = each.of;
    const Values x = random_values(of.rows * of.columns, each.data, 1);
    const Values residual = random_values(x.size(), Data::kNormal, 2);
    const Values q = tiny(random_values(of.rank * of.columns, Data::kNormal, 3));
    Values sum = x;
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += residual[i];

    Guarded in(x), added(residual, 3), factor(q, 5), v(Values(x.size()), 7),
        p(Values(of.rows * of.rank), 9);
    table().left(in.data(), nullptr, nullptr, factor.data(), p.data(), of);
    ASSERT_EQ(bits(p.values()), bits(left_by_definition(x, q, of))) << text_of(each);
    table().left(in.data(), added.data(), v.data(), factor.data(), p.data(), of);
    ASSERT_EQ(bits(p.values()), bits(left_by_definition(sum, q, of))) << text_of(each);
    ASSERT_EQ(bits(v.values()), bits(sum)) << text_of(each);
    table().left(in.data(), added.data(), in.data(), factor.data(), p.data(), of);
    ASSERT_EQ(bits(in.values()), bits(sum)) << text_of(each) << " in place";
  }
}

TEST_P(EveryTable, FindsTheRightFactorAsDefined) {
  for (const Case& each : cases()) {
    const Factors& of = each.of;
    const Values v = random_values(of.rows * of.columns, each.data, 1);
    const Values p = random_values(of.rank * of.rows, Data::kNormal, 2);
    Guarded in(v, 2), factor(p, 4), q(Values(of.rank * of.columns, 99), 6);
    table().right(in.data(), factor.data(), q.data(), of);
    ASSERT_EQ(bits(q.values()), bits(right_by_definition(v, p, of))) << text_of(each);
  }
}

TEST_P(EveryTable, MultipliesTheFactorsAsDefined) {
  for (const Case& each : cases()) {
    const Factors& of = each.of;
    const Values v = random_values(of.rows * of.columns, each.data, 1);
    const Values p = random_values(of.rank * of.rows, Data::kNormal, 2);
    const Values q = tiny(random_values(of.rank * of.columns, each.data, 3));
    const Values own_q = tiny(random_values(of.rank * of.columns, each.data, 4));
    const float scale = 1 / kHeadroom * (1.0F / 3);
    const Values sent = product_by_definition(p, own_q, 0.5F / kHeadroom, of);
    Values error = v;
    for (std::size_t i = 0; i < v.size(); ++i)
      error[i] = std::clamp(error[i] - sent[i], -kLargest, kLargest);
    const Values expected = product_by_definition(p, q, scale, of);

    Guarded left(p, 2), right(q, 4), own(own_q, 6), y(v, 8), e(v, 10);
    table().product({left.data(), right.data(), scale, y.data(), own.data(), 0.5F / kHeadroom,
                     y.data(), e.data()},
                    of);
    ASSERT_EQ(bits(y.values()), bits(expected)) << text_of(each);
    ASSERT_EQ(bits(e.values()), bits(error)) << text_of(each);
    Guarded alone(v);
    table().product({left.data(), right.data(), scale, alone.data(), nullptr, 0, nullptr, nullptr},
                    of);
    ASSERT_EQ(bits(alone.values()), bits(expected)) << text_of(each) << " without error";
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, EveryTable,
                         testing::ValuesIn(available_kernels().begin(), available_kernels().end()),
                         [](const auto& table) { return std::string(table.param->name); });

// ---- Gram-Schmidt ------------------------------------------------------------------------------

double dot(const Values& p, std::size_t a, std::size_t b, std::size_t n) {
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += static_cast<double>(p[a * n + i]) * p[b * n + i];
  return sum;
}

Values orthonormal(Values p, const Factors& of) {
  std::vector<double> room;
  orthonormalise(of, p, room);
  return p;
}

TEST(Orthonormalise, GivesOrthogonalColumnsOfLengthOneWhateverTheirScale) {
  const Factors of{101, 0, 7};
  for (Data data : {Data::kNormal, Data::kHuge, Data::kDenormal}) {
    const Values p = orthonormal(random_values(of.rows * of.rank, data, 5), of);
    for (std::size_t a = 0; a < of.rank; ++a)
      for (std::size_t b = 0; b <= a; ++b)
        EXPECT_NEAR(dot(p, a, b, of.rows), a == b ? 1 : 0, 1e-6) << a << " " << b;
  }
}

TEST(Orthonormalise, KeepsTheSpanOfTheFirstColumns) {
  const Factors of{50, 0, 3};
  const Values before = random_values(of.rows * of.rank, Data::kNormal, 6);
  const Values p = orthonormal(before, of);
  for (std::size_t k = 0; k < of.rank; ++k) {
    double left = dot(before, k, k, of.rows);
    for (std::size_t l = 0; l <= k; ++l) {
      double along = 0;
      for (std::size_t i = 0; i < of.rows; ++i)
        along += static_cast<double>(before[k * of.rows + i]) * p[l * of.rows + i];
      left -= along * along;
    }
    EXPECT_NEAR(left / dot(before, k, k, of.rows), 0, 1e-6) << "column " << k;
  }
}

TEST(Orthonormalise, TurnsColumnsThatDependOnOthersToZero) {
  const Factors of{33, 0, 4};
  Values p = random_values(of.rows * of.rank, Data::kNormal, 7);
  for (std::size_t i = 0; i < of.rows; ++i) {
    p[1 * of.rows + i] = -4 * p[i];
    p[2 * of.rows + i] = 0;
  }
  p = orthonormal(p, of);
  EXPECT_NEAR(dot(p, 0, 0, of.rows), 1, 1e-6);
  EXPECT_EQ(dot(p, 1, 1, of.rows), 0);
  EXPECT_EQ(dot(p, 2, 2, of.rows), 0);
  EXPECT_NEAR(dot(p, 3, 3, of.rows), 1, 1e-6);
}

// ---- Where a call begins -----------------------------------------------------------------------

Values started(const Values& last, const Factors& of) {
  Values q(of.rank * of.columns);
  start_factor(last, of, q);
  return q;
}

float largest(const Values& q, const Factors& of, std::size_t k) {
  float most = 0;
  for (std::size_t j = 0; j < of.columns; ++j)
    most = std::max(most, std::fabs(q[k * of.columns + j]));
  return most;
}

TEST(StartFactor, IsTheSameOnAllMachinesAndDiffersByColumn) {
  const Factors of{0, 5, 2};
  const Values q = started({}, of);
  const Values by_another_program = {
      0x1.8882a4p-33F,  -0x1.187610p-35F, -0x1.e4ee8cp-33F, 0x1.e22ee4p-33F,  -0x1.9319dcp-33F,
      -0x1.cfb618p-34F, 0x1.9ffe04p-33F,  0x1.9edb30p-35F,  -0x1.883884p-33F, 0x1.960640p-37F};
  EXPECT_EQ(q, by_another_program);
}

TEST(StartFactor, ScalesTheLastOneByPowersOfTwo) {
  const Factors of{0, 37, 6};
  for (Data data : {Data::kNormal, Data::kHuge, Data::kDenormal}) {
    const Values last = random_values(of.rank * of.columns, data, 8);
    const Values q = started(last, of);
    for (std::size_t k = 0; k < of.rank; ++k) {
      const double ratio = largest(q, of, k) / static_cast<double>(largest(last, of, k));
      int exponent = 0;
      EXPECT_EQ(std::frexp(ratio, &exponent), 0.5);
      EXPECT_GE(largest(q, of, k), kHeadroom / 2);
      EXPECT_LT(largest(q, of, k), kHeadroom);
      for (std::size_t j = k * of.columns; j < (k + 1) * of.columns; ++j)
        ASSERT_EQ(q[j], static_cast<float>(last[j] * ratio));
    }
  }
}

TEST(StartFactor, KeepsTheColumnsThatThereAre) {
  const Factors two{0, 20, 2}, three{0, 20, 3};
  const Values last = random_values(2 * 20, Data::kNormal, 9);
  Values expected = started(last, two), fresh = started({}, three);
  expected.insert(expected.end(), fresh.begin() + 40, fresh.end());
  EXPECT_EQ(started(last, three), expected);
  expected.resize(20);
  EXPECT_EQ(started(last, {0, 20, 1}), expected);
}

TEST(StartFactor, DrawsColumnsAnewThatLeadNowhere) {
  const Factors of{0, 20, 3};
  Values last = random_values(of.rank * of.columns, Data::kNormal, 9);
  std::fill_n(last.begin(), of.columns, 0.0F);
  last[2 * of.columns + 5] = std::numeric_limits<float>::quiet_NaN();
  const Values q = started(last, of), fresh = started({}, of);
  for (std::size_t j = 0; j < of.columns; ++j) {
    EXPECT_EQ(q[j], fresh[j]);
    EXPECT_NE(q[of.columns + j], fresh[of.columns + j]);
    EXPECT_EQ(q[2 * of.columns + j], fresh[2 * of.columns + j]);
  }
}

// ---- One rank's whole way ----------------------------------------------------------------------

struct Result {
  Values y, error, q;
};

Result approximate(const Values& v, const Values& last, const Factors& of) {
  const LowRankKernels& run = kernels().lowrank;
  Result result{Values(v.size()), Values(v.size()), started(last, of)};
  Values p(of.rows * of.rank);
  run.left(v.data(), nullptr, nullptr, result.q.data(), p.data(), of);
  p = orthonormal(p, of);
  run.right(v.data(), p.data(), result.q.data(), of);
  const float scale = take_headroom(result.q);
  run.product({p.data(), result.q.data(), scale, result.y.data(), result.q.data(), scale, v.data(),
               result.error.data()},
              of);
  return result;
}

// The sum of `rank` outer products.
Values matrix_of_rank(const Factors& of, unsigned seed, float scale = 1) {
  const Values p = random_values(of.rows * of.rank, Data::kNormal, seed);
  const Values q = random_values(of.columns * of.rank, Data::kNormal, seed + 1);
  return product_by_definition(p, q, scale, of);
}

double norm(const Values& x) {
  double sum = 0;
  for (float each : x) sum += static_cast<double>(each) * each;
  return std::sqrt(sum);
}

TEST(Approximation, IsExactForMatricesOfItsRankAtAnyScale) {
  for (float scale : {1.0F, 0x1p-60F, 0x1p+100F}) {
    const Factors of{60, 45, 3};
    const Values v = matrix_of_rank(of, 10, scale);
    const Result result = approximate(v, {}, of);
    EXPECT_LT(norm(result.error), 3e-6 * norm(v)) << scale;
  }
}

TEST(Approximation, DoesNotDependOnTheScale) {
  const Factors of{30, 41, 2};
  const Values v = random_values(of.rows * of.columns, Data::kNormal, 12);
  Values larger = v;
  for (float& each : larger) each *= 0x1p50F;
  const Result one = approximate(v, {}, of), other = approximate(larger, {}, of);
  for (std::size_t i = 0; i < v.size(); ++i) ASSERT_EQ(one.y[i] * 0x1p50F, other.y[i]);
}

// With singular values 4, 2, 1, 1/2 … a rank of 2 can reach √(1/15) of the norm, and a power
// iteration comes near it.
TEST(Approximation, ComesNearTheBestOneOverCalls) {
  const Factors all{64, 64, 8}, two{64, 64, 2};
  Values p = orthonormal(random_values(64 * 8, Data::kNormal, 13), all);
  Values q = orthonormal(random_values(64 * 8, Data::kNormal, 14), all);
  double value = 4;
  double best = 0;
  for (std::size_t k = 0; k < 8; ++k, value /= 2) {
    for (std::size_t j = 0; j < 64; ++j) q[k * 64 + j] *= static_cast<float>(value);
    if (k >= 2) best += value * value;
  }
  const Values v = product_by_definition(p, q, 1, all);
  Result result = approximate(v, {}, two);
  const double first = norm(result.error);
  for (int call = 0; call < 10; ++call) result = approximate(v, result.q, two);
  EXPECT_NEAR(norm(result.error), std::sqrt(best), 1e-3);
  EXPECT_GT(first, std::sqrt(best) + 1e-2) << "or there was nothing to gain";
}

TEST(Approximation, AndItsErrorAddUpAtAnyScale) {
  const Factors of{40, 33, 4};
  for (int exponent = -150; exponent <= 110; exponent += 10) {
    Values v = random_values(of.rows * of.columns, Data::kNormal, 15);
    float most = 0;
    for (float& each : v) {
      each = std::ldexp(each, exponent);
      most = std::max(most, std::fabs(each));
    }
    const Result result = approximate(v, {}, of);
    for (std::size_t i = 0; i < v.size(); ++i)
      ASSERT_NEAR(static_cast<double>(result.y[i]) + result.error[i], v[i], 2e-7 * most + 1e-44)
          << "2^" << exponent;
  }
}

TEST(Approximation, OfTheLargestValuesStaysFinite) {
  const Factors of{300, 200, 2};
  Values v(of.rows * of.columns, kLargest);
  Result result = approximate(v, {}, of);
  EXPECT_TRUE(all_finite(result.y) && all_finite(result.error) && all_finite(result.q));
  EXPECT_LT(norm(result.error), 1e-5 * norm(v));
  for (std::size_t i = 0; i < v.size(); i += 3) v[i] = -kLargest;
  result = approximate(v, result.q, of);
  EXPECT_TRUE(all_finite(result.y) && all_finite(result.error) && all_finite(result.q));
}

TEST(Approximation, OfNothingIsNothing) {
  const Factors of{9, 12, 2};
  const Values zero(of.rows * of.columns);
  const Result result = approximate(zero, {}, of);
  EXPECT_EQ(result.y, zero);
  EXPECT_EQ(result.error, zero);
}

TEST(Approximation, TakesUpAMatrixThatWasZeroSoFar) {
  const Factors of{20, 30, 2};
  const Result nothing = approximate(Values(of.rows * of.columns), {}, of);
  const Values v = matrix_of_rank(of, 16);
  EXPECT_LT(norm(approximate(v, nothing.q, of).error), 1e-5 * norm(v));
}

TEST(TakeHeadroom, LeavesLargeValuesAsTheyAre) {
  Values q = {3e-45F, -1, 0x1p64F}, larger = {1, -0x1.1p64F};
  EXPECT_EQ(take_headroom(q), 1);
  EXPECT_EQ(q, (Values{3e-45F / kHeadroom, -0x1p32F, 0x1p96F}));
  EXPECT_EQ(take_headroom(larger), 0x1p32F);
  EXPECT_EQ(larger, (Values{1, -0x1.1p64F}));
}

TEST(LowRank, FactorsOnlyWhereThatIsSmaller) {
  EXPECT_TRUE(worth_factoring({64, 64, 4}));
  EXPECT_FALSE(worth_factoring({8, 8, 4}));
  EXPECT_TRUE(worth_factoring({9, 8, 4}));
  EXPECT_FALSE(worth_factoring({1, 1000, 1}));
  EXPECT_FALSE(worth_factoring({1000, 1, 1}));
  EXPECT_FALSE(worth_factoring({0, 10, 1}));
}

TEST(LowRank, HasARankAndNoPayloads) {
  const LowRank codec(4);
  EXPECT_EQ(codec.name(), "lowrank");
  EXPECT_EQ(LowRank(2).name(), "lowrank:rank=2");
  EXPECT_TRUE(codec.biased());
  std::vector<std::byte> bytes(64);
  float value = 0;
  EXPECT_THROW(codec.encode(&value, 1, {}, bytes), InvalidArgument);
  EXPECT_THROW(codec.decode(bytes, &value, 1), InvalidArgument);
  EXPECT_THROW(codec.decode_add(bytes, &value, 1), InvalidArgument);
  EXPECT_THROW(LowRank(0), InvalidArgument);
  EXPECT_THROW(LowRank(kMostRank + 1), InvalidArgument);
}

}  // namespace codec_lowrank_test
}  // namespace gradwire::codec
