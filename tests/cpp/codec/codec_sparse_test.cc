// What the sparse codecs share: positions on the wire, selection, and the kernels of every table.
#include "gradwire/codec/sparse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <vector>

#include "codec_reference.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {
namespace codec_sparse_test {

using Indices = std::vector<std::uint16_t>;
using Payload = std::vector<std::byte>;
using Values = std::vector<float>;

Payload written(const Indices& index, std::size_t n) {
  Payload out(most_position_bytes(n));
  out.resize(write_positions(index, n, out.data()));
  return out;
}

PositionFormat read(const Payload& in, std::size_t n, Indices& index) {
  const auto positions = std::make_unique<Positions>();
  PayloadReader reader(in);
  const PositionFormat format = reader.positions(n, *positions);
  EXPECT_EQ(reader.left(), 0U);
  index.assign(positions->all().begin(), positions->all().end());
  return format;
}

Payload bytes(std::initializer_list<int> values) {
  Payload all;
  for (int each : values) all.push_back(static_cast<std::byte>(each));
  return all;
}

Indices every(std::size_t step, std::size_t n, std::size_t first = 0) {
  Indices index;
  for (std::size_t i = first; i < n; i += step) index.push_back(static_cast<std::uint16_t>(i));
  return index;
}

struct Case {
  const char* name;
  PositionFormat format;
  std::size_t n;
  Indices index;
};

std::vector<Case> cases() {
  return {{"nothing", PositionFormat::kNone, 7, {}},
          {"everything", PositionFormat::kAll, kSparseBlock, every(1, kSparseBlock)},
          {"the only one", PositionFormat::kAll, 1, {0}},
          {"one far away", PositionFormat::kList, kSparseBlock, {31999}},
          {"two far away", PositionFormat::kList, kSparseBlock, {31999, 32767}},
          {"one in a thousand", PositionFormat::kGaps, kSparseBlock, every(1000, kSparseBlock, 3)},
          {"one in ten", PositionFormat::kGaps, kSparseBlock, every(10, kSparseBlock)},
          {"a gap of many zeros",
           PositionFormat::kGaps,
           20000,
           {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 19999}},
          {"every other one", PositionFormat::kBitmap, kSparseBlock, every(2, kSparseBlock)},
          {"all but one", PositionFormat::kBitmap, 1001, every(1, 1001, 1)}};
}

TEST(Positions, EveryLayoutIsChosenForItsKindAndGivesThemBack) {
  std::set<PositionFormat> seen;
  for (const Case& each : cases()) {
    Indices again;
    EXPECT_EQ(read(written(each.index, each.n), each.n, again), each.format) << each.name;
    EXPECT_EQ(again, each.index) << each.name;
    seen.insert(each.format);
  }
  EXPECT_EQ(seen.size(), 5U);
}

TEST(Positions, AnySetComesBack) {
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 3000; ++trial) {
    const std::size_t n = 1 + random() % (trial % 10 == 0 ? kSparseBlock : 200);
    const std::uint64_t of = 1 + random() % (trial % 3 == 0 ? 3 : 300);
    Indices index, again;
    for (std::size_t i = 0; i < n; ++i)
      if (random() % of == 0) index.push_back(static_cast<std::uint16_t>(i));
    const Payload payload = written(index, n);
    ASSERT_LE(payload.size(), most_position_bytes(n));
    read(payload, n, again);
    ASSERT_EQ(again, index);
    for (std::size_t size = 0; size < payload.size(); ++size)
      ASSERT_THROW(
          read({payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(size)}, n, again),
          InvalidArgument);
  }
}

// The definition, byte by byte.
TEST(Positions, LieAsTheHeaderSays) {
  EXPECT_EQ(written({}, 9), bytes({0}));
  EXPECT_EQ(written({0x1234, 0x7FFF}, kSparseBlock), bytes({1, 2, 0x34, 0x12, 0xFF, 0x7F}));
  EXPECT_EQ(written({0, 2, 3, 8}, 9), bytes({3, 0b00001101, 1}));
  EXPECT_EQ(written({0, 1, 2}, 3), bytes({4}));
  // Gaps 3, 0, 9 with one low bit: 01 1, 1 0, 00001 1, first bit lowest.
  EXPECT_EQ(written({3, 4, 14}, 200), bytes({2 | 1 << 3, 3, 0b00001110, 0b110}));
  const Indices many = every(100, 20000);
  const Payload payload = written(many, 20000);
  EXPECT_EQ(payload[1], std::byte{(200 & 127) | 128});
  EXPECT_EQ(payload[2], std::byte{200 / 128});
}

TEST(Positions, AreNeverLongerThanAListOrABitmap) {
  std::mt19937_64 random(6);
  for (const double density : {0.0001, 0.001, 0.01, 0.1, 0.2, 0.3}) {
    Indices index;
    for (std::size_t i = 0; i < kSparseBlock; ++i)
      if (static_cast<double>(random() % 1'000'000) < density * 1e6)
        index.push_back(static_cast<std::uint16_t>(i));
    const std::size_t size = written(index, kSparseBlock).size();
    EXPECT_LE(size, 1 + std::min(2 + 2 * index.size(), kSparseBlock / 8)) << density;
    // The entropy of the positions, and what Golomb-Rice codes and headers may add.
    const double bits = -density * std::log2(density) - (1 - density) * std::log2(1 - density);
    EXPECT_LE(static_cast<double>(size), 1.35 * bits * kSparseBlock / 8 + 5) << density;
  }
}

TEST(Positions, WhatNoEncoderWritesIsRefused) {
  Indices index;
  for (const Payload& each : {
           bytes({}),
           bytes({6}),
           bytes({7}),
           bytes({0x80}),
           bytes({1 | 8, 0}),
           bytes({0 | 16}),
           bytes({1, 2, 5, 0, 5, 0}),                                // twice the same
           bytes({1, 2, 5, 0, 4, 0}),                                // descends
           bytes({1, 1, 100, 0}),                                    // leaves the unit
           bytes({1, 101}),                                          // more indices than elements
           bytes({2, 101}),                                          // likewise
           bytes({2, 0xFF, 0xFF}),                                   // likewise
           bytes({2, 1, 0, 0, 0, 0, 0, 0}),                          // a gap without an end
           bytes({2 | 15 << 3, 1, 0xFF}),                            // a gap cut short
           bytes({2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10}),  // leaves the unit
           bytes({3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16}),       // likewise
           bytes({2 | 15 << 3, 3, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF}),
       }) {
    EXPECT_THROW(read(each, 100, index), InvalidArgument);
  }
}

class Selection : public testing::Test {
 protected:
  Indices by_sorting(const Values& v, std::size_t k) {
    Indices order(v.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::uint16_t a, std::uint16_t b) {
      return std::fabs(v[a]) > std::fabs(v[b]);
    });
    order.resize(k);
    std::sort(order.begin(), order.end());
    return order;
  }

  void check(const Values& v, std::size_t k, float guess) {
    SparseScratch& scratch = SparseScratch::mine();
    float filter = guess;
    Values kept(v.size());
    const std::uint32_t least =
        select_largest({v.data(), nullptr, v.size()}, k, kept.data(), filter, scratch);
    const auto chosen = scratch.positions.all();
    const Indices expected = by_sorting(v, k);
    ASSERT_TRUE(std::equal(chosen.begin(), chosen.end(), expected.begin(), expected.end()))
        << "n=" << v.size() << " k=" << k << " guess=" << guess;
    float smallest = INFINITY;
    for (std::size_t i : expected) smallest = std::min(smallest, std::fabs(v[i]));
    ASSERT_EQ(least, magnitude_bits(smallest));
    ASSERT_EQ(std::memcmp(kept.data(), v.data(), 4 * v.size()), 0);
  }

  std::mt19937_64 random_{9};
};

TEST_F(Selection, IsThatOfASortWhateverTheGuess) {
  for (const std::size_t n : {1, 2, 63, 64, 65, 1000, 1025, 20000, 32768})
    for (const std::size_t k : {std::size_t{1}, 1 + n / 1000, 1 + n / 10, n})
      for (const int kind : {0, 1, 2, 3}) {
        Values v(n);
        for (float& each : v) {
          each = draw_float(kind == 2 ? Data::kDenormal : Data::kNormal, random_);
          if (kind == 1) each = static_cast<float>(static_cast<int>(random_() % 5) - 2);  // ties
          if (kind == 3) each = random_() % 2 == 0 ? 0.0F : -0.0F;
        }
        for (const float guess : {0.0F, 1e-30F, 0.5F, 2.0F, 1e30F})
          if (k <= n) check(v, k, guess);
      }
}

TEST_F(Selection, FindsAPeakThatNoSampleSaw) {
  Values v(kSparseBlock, 1e-3F);
  for (std::size_t i = 5; i < v.size(); i += 997) v[i] = static_cast<float>(i);
  check(v, 33, 0);
  check(v, 40, 0);
}

// Arrays that start anywhere within 64 bytes, and what lies around them.
class Shifted {
 public:
  Shifted(const Values& values, std::size_t shift) : shift_(shift), all_(values.size() + 48, 7.5F) {
    std::copy(values.begin(), values.end(), all_.begin() + static_cast<std::ptrdiff_t>(16 + shift));
  }
  float* data() { return all_.data() + 16 + shift_; }
  bool operator==(const Shifted& other) const {
    return std::memcmp(all_.data(), other.all_.data(), 4 * all_.size()) == 0;
  }

 private:
  std::size_t shift_;
  Values all_;
};

class SparseDifferential : public testing::TestWithParam<bool> {
 protected:
  Values draw(Data data, std::size_t n) {
    Values v(n);
    for (float& each : v) {
      each = draw_float(data, random_);
      if (!std::isfinite(each) && data != Data::kRandomBits) each = 0;
    }
    return v;
  }

  struct Result {
    std::uint32_t largest;
    std::vector<std::uint64_t> hits;
    Shifted kept;
    bool operator==(const Result&) const = default;
  };

  // `where` says which of residual and output there are: 4 means that they are the same.
  Result run(const Kernels& table, Values x, const Values& residual, float tau, int where,
             std::size_t shift) {
    const std::size_t words = x.size() / 64 + 2;
    Result result{0, std::vector<std::uint64_t>(words),
                  Shifted(where == 4 ? residual : Values(x.size(), -1.0F), shift)};
    Shifted from(x, (shift * 5) % 16), fed_back(residual, (shift * 3) % 16);
    float* kept = where & 6 ? result.kept.data() : nullptr;
    const float* r = where == 4 ? kept : where & 1 ? fed_back.data() : nullptr;
    if (GetParam())
      result.largest =
          table.sparse.threshold(from.data(), r, tau, x.size(), result.hits.data(), kept);
    else
      result.largest = table.sparse.filter(from.data(), r, tau, x.size(), result.hits.data(), kept);
    return result;
  }

  std::mt19937_64 random_{4};
};

TEST_P(SparseDifferential, EveryTableGivesTheBytesOfScalar) {
  std::vector<std::size_t> lengths(141);
  std::iota(lengths.begin(), lengths.end(), 0);
  lengths.insert(lengths.end(), {1023, 1025, 4099, kSparseBlock - 1, kSparseBlock});
  for (const std::size_t n : lengths)
    for (const Data data : {Data::kNormal, Data::kHuge, Data::kDenormal, Data::kSpecial})
      for (const int where : {0, 1, 2, 3, 4}) {
        const Values x = draw(data, n), residual = draw(data, n);
        const float tau = data == Data::kHuge       ? 1e38F
                          : data == Data::kDenormal ? 0x1p-127F
                                                    : 0x1p-1F;
        const Result expected = run(*available_kernels().back(), x, residual, tau, where, n % 16);
        for (const Kernels* table : available_kernels())
          ASSERT_EQ(run(*table, x, residual, tau, where, n % 16), expected)
              << table->name << " n=" << n << " where=" << where;
      }
}

TEST_P(SparseDifferential, ScalarIsTheDefinition) {
  const Values x = draw(Data::kNormal, 5000), residual = draw(Data::kNormal, 5000);
  const float tau = 0.75F;
  Result result = run(*available_kernels().back(), x, residual, tau, 3, 1);
  float largest = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float v = x[i] + residual[i], y = std::fabs(v) >= tau ? std::copysign(tau, v) : 0;
    largest = std::max(largest, std::fabs(v));
    ASSERT_EQ((result.hits[i / 64] >> (i % 64)) & 1, std::fabs(v) >= tau ? 1U : 0U);
    ASSERT_EQ(result.kept.data()[i], GetParam() ? v - y : v);
    ASSERT_EQ(std::signbit(result.kept.data()[i]), std::signbit(v));
  }
  EXPECT_EQ(result.largest, magnitude_bits(largest));
}

TEST_P(SparseDifferential, EveryTableSeesNanAndInfAnywhere) {
  for (const Kernels* table : available_kernels())
    for (const float poison : {NAN, -NAN, INFINITY, -INFINITY})
      for (std::size_t n : {1, 31, 33, 100, 2000})
        for (std::size_t at = 0; at < n; at += 1 + n / 50) {
          Values x = draw(Data::kNormal, n);
          x[at] = poison;
          ASSERT_GE(run(*table, x, x, 0.5F, 2, at % 16).largest, kInfinityBits) << table->name;
        }
}

INSTANTIATE_TEST_SUITE_P(Kernels, SparseDifferential, testing::Values(true, false),
                         [](const auto& each) { return each.param ? "threshold" : "filter"; });

}  // namespace codec_sparse_test
}  // namespace gradwire::codec
