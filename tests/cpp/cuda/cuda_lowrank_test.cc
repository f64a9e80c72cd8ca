// lowrank on the device: the bits of the CPU's kernels (codec/factors.h, codec/lowrank.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "codec_reference.h"
#include "cuda_arrays.h"
#include "gradwire/codec/lowrank.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::cuda {
namespace {

using codec::Data;
using codec::Factors;
using codec::kHeadroom;
using codec::kMostRank;
using Values = std::vector<float>;
using Floats = DeviceArray<float>;

const Api& api() { return simulated_api(); }

Values random_values(std::size_t n, Data data, unsigned seed) {
  std::mt19937_64 random(seed);
  Values x(n);
  for (float& value : x) value = codec::draw_float(data, random);
  return x;
}

// All NaNs are one.
std::vector<std::uint32_t> bits(const Values& values) {
  std::vector<std::uint32_t> all;
  for (float each : values)
    all.push_back(std::isnan(each) ? 0x7FC00000U : std::bit_cast<std::uint32_t>(each));
  return all;
}

Values tiny(Values values) {
  for (float& each : values) each *= kHeadroom;
  return values;
}

struct Case {
  Factors of;
  Data data;
};

std::string text_of(const Case& each) {
  return std::to_string(each.of.rows) + "x" + std::to_string(each.of.columns) + " rank " +
         std::to_string(each.of.rank) + " data " + std::to_string(static_cast<int>(each.data));
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Factors& of : {Factors{1, 1, 1}, Factors{2, 33, 2}, Factors{7, 17, 3},
                            Factors{9, 15, 5}, Factors{17, 79, 8}, Factors{31, 257, 16},
                            Factors{40, 40, 17}, Factors{0, 10, 2}, Factors{10, 0, 2}})
    for (const Data data : {Data::kNormal, Data::kHuge, Data::kDenormal}) all.push_back({of, data});
  for (const Factors& of : {Factors{8, 64, 4}, Factors{65, 31, 9}, Factors{70, 45, kMostRank},
                            Factors{5, 1045, 6}, Factors{600, 12, 4}, Factors{1100, 9, 2}})
    all.push_back({of, Data::kNormal});
  all.push_back({{4100, 18, 1}, Data::kNormal});  // enough rows for large blocks
  all.push_back({{9, 4100, 4}, Data::kNormal});   // wider strips
  all.push_back({{9, 8200, 3}, Data::kNormal});
  all.push_back({{40, 30, 4}, Data::kRandomBits});
  all.push_back({{40, 30, 4}, Data::kSpecial});
  return all;
}

// A key with memory for both sides of something.
struct Key {
  explicit Key(std::uint32_t which) : key_state({GpuKeyState{which, which, 0, {}}}, 0) {}
  DeviceArray<GpuKeyState> key_state;
};

TEST(CudaLowRank, FindsTheLeftFactor) {
  const codec::FloatEnvironment environment;
  for (const Case& each : cases()) {
    const Factors& of = each.of;
    const Values x = random_values(of.rows * of.columns, each.data, 1);
    const Values residual = random_values(x.size(), Data::kNormal, 2);
    const Values q = tiny(random_values(of.rank * of.columns, Data::kNormal, 3));
    Values v(x.size()), expected(of.rows * of.rank), plain(expected);
    const auto left = codec::kernels().lowrank.left;
    left(x.data(), nullptr, nullptr, q.data(), plain.data(), of);
    left(x.data(), residual.data(), v.data(), q.data(), expected.data(), of);

    const Key key(1);
    const Floats in(x), other(Values(x.size()), 2), added(residual, 3), factor(q, 5),
        sum(Values(x.size(), -7), 6), p(Values(expected.size(), -7), 7);
    const SpanFeedback none{{nullptr, nullptr}, nullptr};
    const SpanFeedback span_feedback{{other.data(), added.data()}, key.key_state.data()};
    const auto find = [&](const SpanFeedback& feedback, float* y) {
      const GpuMatrix one{.of = of,
                          .x = in.data(),
                          .y = y,
                          .span_feedback = feedback,
                          .p = p.data(),
                          .q = factor.data()};
      api().left_factor(&one, 1, test_stream());
    };
    find(none, nullptr);
    ASSERT_EQ(bits(p.values()), bits(plain)) << text_of(each);
    find(span_feedback, sum.data());
    ASSERT_EQ(bits(p.values()), bits(expected)) << text_of(each);
    ASSERT_EQ(bits(sum.values()), bits(v)) << text_of(each);
    find(span_feedback, in.data());
    ASSERT_EQ(bits(p.values()), bits(expected)) << text_of(each) << " in place";
    ASSERT_EQ(bits(in.values()), bits(v)) << text_of(each) << " in place";
  }
}

TEST(CudaLowRank, FindsTheRightFactor) {
  const codec::FloatEnvironment environment;
  for (const Case& each : cases()) {
    const Factors& of = each.of;
    const Values v = random_values(of.rows * of.columns, each.data, 1);
    const Values p = random_values(of.rank * of.rows, Data::kNormal, 2);
    Values expected(of.rank * of.columns);
    codec::kernels().lowrank.right(v.data(), p.data(), expected.data(), of);
    const Floats in(v, 2), factor(p, 4), q(Values(expected.size(), 99), 6);
    const GpuMatrix one{.of = of, .x = in.data(), .p = factor.data(), .own_q = q.data()};
    api().right_factor(&one, 1, test_stream());
    ASSERT_EQ(bits(q.values()), bits(expected)) << text_of(each);
  }
}

TEST(CudaLowRank, MultipliesTheFactors) {
  const codec::FloatEnvironment environment;
  for (const Case& each : cases()) {
    const Factors& of = each.of;
    const Values v = random_values(of.rows * of.columns, each.data, 1);
    const Values p = random_values(of.rank * of.rows, Data::kNormal, 2);
    const Values q = tiny(random_values(of.rank * of.columns, each.data, 3));
    const Values own_q = tiny(random_values(of.rank * of.columns, each.data, 4));
    const float factor = 1.0F / 3, scale = 1 / kHeadroom, own_scale = 0.5F / kHeadroom;
    Values y(v.size()), error(v.size());
    codec::kernels().lowrank.product({p.data(), q.data(), factor * scale, y.data(), own_q.data(),
                                      own_scale, v.data(), error.data()},
                                     of);

    const Key key(0);
    const Floats left(p, 2), right(q, 4), own(own_q, 6), in(v, 8), out(Values(v.size(), -7), 5),
        e(Values(v.size(), -7), 10), scales({scale, own_scale});
    const SpanFeedback span_feedback{{out.data(), e.data()}, key.key_state.data()};
    GpuMatrix one{.of = of,
                  .x = in.data(),
                  .y = in.data(),
                  .span_feedback = span_feedback,
                  .p = left.data(),
                  .q = right.data(),
                  .own_q = own.data(),
                  .scales = scales.data()};
    api().product(&one, 1, factor, test_stream());
    ASSERT_EQ(bits(in.values()), bits(y)) << text_of(each) << " in place";
    ASSERT_EQ(bits(e.values()), bits(error)) << text_of(each);
    one.span_feedback = {};
    one.y = out.data();
    one.own_q = nullptr;
    api().product(&one, 1, factor, test_stream());
    ASSERT_EQ(bits(out.values()), bits(y)) << text_of(each) << " without error";
  }
}

// ---- What is done to factors
// ---------------------------------------------------------------------

Values dependent_columns(const Factors& of) {
  Values p = random_values(of.rows * of.rank, Data::kNormal, 7);
  for (std::size_t i = 0; i < of.rows; ++i) {
    p[1 * of.rows + i] = -4 * p[i];
    p[2 * of.rows + i] = 0;
  }
  return p;
}

void expect_orthonormalised(Values p, const Factors& of) {
  const Floats on_device(p, 3);
  const DeviceArray<double> room(std::vector<double>(p.size()), 1);
  const GpuMatrix one{.of = of, .p = on_device.data(), .room = room.data()};
  api().orthonormalise(&one, 1, test_stream());
  std::vector<double> cpu_room;
  codec::orthonormalise(of, p, cpu_room);
  ASSERT_EQ(bits(on_device.values()), bits(p)) << of.rows << " rows, rank " << of.rank;
  room.values();
}

TEST(CudaLowRank, Orthonormalises) {
  const codec::FloatEnvironment environment;
  for (const std::size_t rows : {0, 1, 15, 16, 17, 101, 991, 993, 2500})
    expect_orthonormalised(random_values(rows * 3, Data::kNormal, 5), {rows, 0, 3});
  for (const std::size_t rank : {1, 2, 6})
    for (const Data data : {Data::kHuge, Data::kDenormal})
      expect_orthonormalised(random_values(200 * rank, data, 5), {200, 0, rank});
  expect_orthonormalised(random_values(40 * kMostRank, Data::kNormal, 6), {40, 0, kMostRank});
  expect_orthonormalised(random_values(9 * 12, Data::kNormal, 6), {9, 0, 12});
  expect_orthonormalised(dependent_columns({33, 0, 4}), {33, 0, 4});
  expect_orthonormalised(Values(40 * 3), {40, 0, 3});
}

// `last`: of all columns.
void expect_started(const Values& last, const Factors& of) {
  const Key key(1);
  const Floats old(last, 2), other(Values(last.size(), 5), 3), q(Values(last.size(), -7), 1);
  const Memory memory{{other.data(), old.data()}, key.key_state.data()};
  Values expected(last.size());
  codec::start_factor(last, of, expected);
  const Floats scales(Values{7, 7});
  GpuMatrix one{.of = of, .memory = memory, .q = q.data(), .scales = scales.data()};
  api().start_factor(&one, 1, test_stream());
  ASSERT_EQ(bits(q.values()), bits(expected)) << of.columns << " columns, rank " << of.rank;
  EXPECT_EQ(scales.values(), of.columns > 0 ? (Values{0, 0}) : (Values{7, 7}));
  codec::start_factor({}, of, expected);
  one.memory = {};
  api().start_factor(&one, 1, test_stream());
  ASSERT_EQ(bits(q.values()), bits(expected)) << "from nothing";
}

TEST(CudaLowRank, BeginsWithWhatItRemembers) {
  const codec::FloatEnvironment environment;
  for (const std::size_t columns : {0, 1, 37, 1500})
    for (const Data data : {Data::kNormal, Data::kHuge, Data::kDenormal, Data::kSpecial}) {
      const Factors of{0, columns, 4};
      Values last = random_values(of.columns * of.rank, data, 8);
      expect_started(last, of);
      std::fill_n(last.begin() + static_cast<std::ptrdiff_t>(columns), columns, -0.0F);
      expect_started(last, of);
    }
  expect_started(random_values(5 * kMostRank, Data::kDenormal, 9), {0, 5, kMostRank});
}

TEST(CudaLowRank, TakesOutTheHeadroom) {
  const codec::FloatEnvironment environment;
  std::vector<Values> all = {{3e-45F, -1, 0x1p64F}, {1, -0x1.1p64F}, {0}};
  all.push_back(random_values(3000, Data::kNormal, 1));
  all.push_back(random_values(3000, Data::kDenormal, 2));
  all.push_back(random_values(1025, Data::kHuge, 3));
  for (const float last : {1.0F, 0x1.1p64F, -INFINITY, NAN}) {  // of many, seen by one block
    all.push_back(random_values(40000, Data::kNormal, 4));
    all.back().back() = last;
    all.back().front() = std::isnan(last) ? 0x1.1p64F : 1;
  }
  for (Values& each : all) {
    const Floats q(each, 3), own(Values{2, 0x1.1p64F}), scales({0, 0});
    const GpuMatrix one{.of = {0, each.size(), 1}, .q = q.data(), .scales = scales.data()};
    api().take_headroom(&one, 1, test_stream());
    EXPECT_EQ(scales.values()[1], 0);
    const float expected = codec::take_headroom(each);
    EXPECT_EQ(bits(q.values()), bits(each));
    EXPECT_EQ(scales.values()[0], expected);
    const GpuMatrix other{.of = {0, 2, 1}, .own_q = own.data(), .scales = scales.data()};
    api().take_headroom(&other, 1, test_stream());
    EXPECT_EQ(scales.values(), (Values{expected, 1 / kHeadroom}));
  }
}

TEST(CudaLowRank, SeesWhatIsNotFinite) {
  for (const std::size_t n : {1, 31, 5000, 20000})
    for (const float poison : {1.0F, NAN, -INFINITY}) {
      Values x(n, std::numeric_limits<float>::max());
      x[n - 1 - n / 3] = poison;
      const Floats in(x);
      const DeviceArray<std::uint32_t> flags({kRefused});
      api().check_finite(in.data(), n, flags.data(), test_stream());
      EXPECT_EQ(flags.values()[0], std::isfinite(poison) ? kRefused : kRefused | kNotFinite) << n;
    }
}

TEST(CudaLowRank, RemembersInTheOtherPlace) {
  const Key key(1);
  const Values q = random_values(3000, Data::kRandomBits, 4);
  const Floats from(q, 3), next(Values(q.size()), 4), last(Values(q.size(), 5), 5);
  GpuMatrix one{.of = {0, q.size() / 4, 4},
                .memory = {{next.data(), last.data()}, key.key_state.data()},
                .q = from.data()};
  api().remember(&one, 1, test_stream());
  one.memory = {};
  api().remember(&one, 1, test_stream());
  EXPECT_EQ(bits(next.values()), bits(q));
  EXPECT_EQ(last.values(), Values(q.size(), 5));
}

TEST(CudaLowRank, OfNothingDoesNothing) {
  const GpuMatrix nothing{.of = {0, 0, 4}};
  for (const int count : {0, 1}) {
    EXPECT_EQ(api().start_factor(&nothing, count, test_stream()), 0);
    EXPECT_EQ(api().left_factor(&nothing, count, test_stream()), 0);
    EXPECT_EQ(api().check_finite(nullptr, 0, nullptr, test_stream()), 0);
    EXPECT_EQ(api().orthonormalise(&nothing, count, test_stream()), 0);
    EXPECT_EQ(api().right_factor(&nothing, count, test_stream()), 0);
    EXPECT_EQ(api().take_headroom(&nothing, count, test_stream()), 0);
    EXPECT_EQ(api().product(&nothing, count, 1, test_stream()), 0);
    EXPECT_EQ(api().remember(&nothing, count, test_stream()), 0);
  }
  wait_for_device();
}

// ---- Many matrices of a call --------------------------------------------------------------------

// What is left of a matrix after all steps of one rank alone.
struct Left {
  explicit Left(const Factors& of, unsigned seed)
      : shape(of),
        x(random_values(of.rows * of.columns, Data::kNormal, seed), seed % 4),
        p(Values(of.rows * of.rank)),
        q(Values(of.columns * of.rank)),
        own_q(Values(of.columns * of.rank)),
        scales(Values{0, 0}),
        room(std::vector<double>(of.rows * of.rank), 0) {}

  GpuMatrix matrix() const {
    return {.of = {shape.rows, shape.columns, shape.rank},
            .x = x.data(),
            .y = x.data(),
            .p = p.data(),
            .room = room.data(),
            .q = q.data(),
            .own_q = own_q.data(),
            .scales = scales.data()};
  }

  Factors shape;
  Floats x, p, q, own_q, scales;
  DeviceArray<double> room;
};

void factor(const std::vector<GpuMatrix>& all) {
  const auto count = static_cast<int>(all.size());
  EXPECT_EQ(api().start_factor(all.data(), count, test_stream()), 0);
  EXPECT_EQ(api().left_factor(all.data(), count, test_stream()), 0);
  EXPECT_EQ(api().orthonormalise(all.data(), count, test_stream()), 0);
  EXPECT_EQ(api().right_factor(all.data(), count, test_stream()), 0);
  EXPECT_EQ(api().take_headroom(all.data(), count, test_stream()), 0);
}

TEST(CudaLowRank, ManyMatricesAreFactoredAsOneIs) {
  std::vector<std::unique_ptr<Left>> together, alone;
  std::vector<GpuMatrix> all;
  for (unsigned i = 0; i < kMostSpans + 3; ++i) {
    const bool is_long = i % 16 == 9;
    const Factors of{is_long ? 2 : i % 7 * 9, is_long ? 11000 : 1 + i % 5 * 13, 3};
    together.push_back(std::make_unique<Left>(of, i));
    alone.push_back(std::make_unique<Left>(of, i));
    all.push_back(together.back()->matrix());
  }
  factor(all);
  for (std::size_t i = 0; i < all.size(); ++i) {
    factor({alone[i]->matrix()});
    EXPECT_EQ(bits(together[i]->p.values()), bits(alone[i]->p.values())) << i;
    EXPECT_EQ(bits(together[i]->own_q.values()), bits(alone[i]->own_q.values())) << i;
    EXPECT_EQ(together[i]->scales.values(), alone[i]->scales.values()) << i;
  }
}

}  // namespace
}  // namespace gradwire::cuda
