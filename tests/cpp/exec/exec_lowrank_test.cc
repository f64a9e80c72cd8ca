// lowrank through whole calls: agreement, conservation, transactions, warm start.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "exec_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/lowrank.h"
#include "gradwire/schedule/generators.h"

namespace gradwire::exec {
namespace exec_lowrank_test {

using codec::ErrorFeedback;
using codec::KeyedArray;
using Values = std::vector<float>;
using Shapes = std::vector<Shape>;

const Shapes kShapes = {{24, 40}, {1, 300}, {300, 1}, {0, 7}, {33, 33}, {7, 0},
                        {129, 9}, {9, 257}, {1, 1},   {4, 4}, {64, 17}};

std::size_t count_of(const Shape& shape) { return shape.rows * shape.columns; }

std::size_t count_of(const Shapes& shapes) {
  std::size_t n = 0;
  for (const Shape& each : shapes) n += count_of(each);
  return n;
}

Values normal(std::size_t n, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> draw;
  Values x(n);
  for (float& value : x) value = draw(random);
  return x;
}

// The sum of `rank` outer products, of which each is `decay` times the one before.
Values matrix_of_rank(const Shape& shape, std::size_t rank, unsigned seed, float decay = 1) {
  Values x(count_of(shape));
  float weight = 1;
  for (std::size_t k = 0; k < rank; ++k, weight *= decay) {
    const unsigned at = seed + 2 * static_cast<unsigned>(k);
    const Values left = normal(shape.rows, at), right = normal(shape.columns, at + 1);
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] += weight * left[i / shape.columns] * right[i % shape.columns];
  }
  return x;
}

double norm(const Values& x) {
  double sum = 0;
  for (float each : x) sum += static_cast<double>(each) * each;
  return std::sqrt(sum);
}

Values difference(Values a, const Values& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

struct How {
  std::string codec = "lowrank:rank=2";
  std::string algorithm = "auto";
  ReduceOp op = ReduceOp::kSum;
  bool feeds_back = true;
  bool in_place = true;
};

// Ranks that reduce arrays of these shapes, each under a key of its own, end to end in one vector.
struct Job {
  Shapes shapes;
  std::vector<KeyedArray> keys;
  std::vector<std::shared_ptr<ErrorFeedback>> feedback;
  Travel travel;
  Ranks ranks;
  unsigned calls = 0;

  Job(int size, Shapes arrays, Travel how = {})
      : shapes(std::move(arrays)), travel(how), ranks(size, how.transport, how.tuning()) {
    for (std::size_t i = 0; i < shapes.size(); ++i)
      keys.push_back({"key" + std::to_string(i), count_of(shapes[i])});
    for (int r = 0; r < size; ++r) feedback.push_back(std::make_shared<ErrorFeedback>());
  }

  std::size_t size() const { return feedback.size(); }
  std::size_t count() const { return count_of(shapes); }

  std::vector<Array> arrays(Values& x) const {
    std::vector<Array> all;
    std::size_t at = 0;
    for (const Shape& each : shapes) {
      all.push_back({reinterpret_cast<std::byte*>(x.data() + at), count_of(each)});
      at += count_of(each);
    }
    return all;
  }

  std::vector<Values> all_reduce(std::vector<Values> x, const How& how = {}) {
    const auto codec = codec::make_codec(how.codec);
    std::vector<Values> y(size());
    ++calls;
    ranks.run([&](Communicator& comm) {
      const auto r = static_cast<std::size_t>(comm.identity().rank);
      travel.delay(comm.identity().rank, calls);
      const Values before = x[r];
      y[r].resize(before.size());
      const auto in = arrays(x[r]), out = arrays(how.in_place ? x[r] : y[r]);
      Request call;
      call.algorithm = how.algorithm;
      call.op = how.op;
      call.codec = codec;
      if (how.feeds_back) {
        call.feedback = feedback[r];
        call.keys = keys;
      }
      call.inputs = in;
      call.outputs = out;
      call.shapes = shapes;
      comm.run(call);
      if (how.in_place)
        y[r] = x[r];
      else
        EXPECT_TRUE(same_bits(x[r], before)) << "an input was written to";
    });
    return y;
  }

  Values residual(std::size_t rank) const {
    Values all;
    for (const auto& key : keys) {
      Values each = feedback[rank]->residual(key.key);
      each.resize(key.count);
      all.insert(all.end(), each.begin(), each.end());
    }
    return all;
  }
};

std::vector<Values> inputs(const Job& job, unsigned call) {
  std::vector<Values> x;
  for (std::size_t r = 0; r < job.size(); ++r)
    x.push_back(normal(job.count(), 100 * call + static_cast<unsigned>(r)));
  return x;
}

void expect_agreement(const std::vector<Values>& y) {
  for (const Values& each : y) EXPECT_TRUE(same_bits(each, y[0]));
}

// What went in and what came out, in float64.
struct Books {
  std::vector<double> sum;
  double scale = 0;

  void put(const Values& x, double sign) {
    sum.resize(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      sum[i] += sign * x[i];
      scale = std::max(scale, std::fabs(static_cast<double>(x[i])));
    }
  }
  void record(const std::vector<Values>& x, const Values& delivered) {
    for (const Values& each : x) put(each, 1);
    put(delivered, -1);
  }
  void expect_balanced(const Job& job, double terms, const std::string& where) {
    for (std::size_t r = 0; r < job.size(); ++r) put(job.residual(r), -1);
    for (std::size_t i = 0; i < sum.size(); ++i)
      ASSERT_NEAR(sum[i], 0, terms * scale * 0x1p-22) << where << " element " << i;
  }
};

TEST(LowRank, RanksAgreeAndNothingIsLost) {
  for (int size = 1; size <= kMostRanks; ++size)
    for (const char* algorithm : {"auto", "ring", "recursive_doubling", "binary_tree"}) {
      Job job(size, kShapes, {any_transport(size)});
      Books books;
      constexpr unsigned kCalls = 8;
      for (unsigned call = 0; call < kCalls; ++call) {
        const auto x = inputs(job, call);
        How how;
        how.algorithm = algorithm;
        how.in_place = call % 2 == 0;
        how.codec = "lowrank:rank=" + std::to_string(1 + call % 4);
        const auto y = job.all_reduce(x, how);
        expect_agreement(y);
        books.record(x, y[0]);
      }
      books.expect_balanced(job, size * kCalls,
                            std::string(algorithm) + " p=" + std::to_string(size));
    }
}

TEST(LowRank, NeitherTimingNorSegmentsNorTransportChangeABit) {
  const Shapes shapes = {{64, 90}, {1, 5000}, {128, 30}};
  for (const char* algorithm : {"auto", "ring", "halving_doubling"}) {
    std::vector<Values> expected;
    std::vector<std::uint64_t> frames;
    for (const Travel& travel : {Travel{"inproc", 1 << 20, true}, Travel{"inproc", 600, true},
                                 Travel{"shm", 5000, true}, Travel{"tcp", 2000, true}}) {
      Job job(3, shapes, travel);
      How how;
      how.algorithm = algorithm;
      std::vector<Values> found;
      for (unsigned call = 0; call < 3; ++call) found = job.all_reduce(inputs(job, call), how);
      for (std::size_t r = 0; r < 3; ++r) found.push_back(job.residual(r));
      frames.push_back(job.ranks[0].traffic().frames_sent);
      if (expected.empty()) expected = found;
      for (std::size_t i = 0; i < found.size(); ++i)
        ASSERT_TRUE(same_bits(found[i], expected[i]))
            << algorithm << " " << travel.transport << " " << travel.segment_bytes;
    }
    EXPECT_GE(frames[1], 3 * frames[0]) << algorithm << ": not cut into segments";
  }
}

// All left factors of a call in one collective, and all right ones in another.
TEST(LowRank, MatricesOfACallTravelTogether) {
  const auto frames_of = [](Shapes shapes, std::string_view codec = "lowrank") {
    Job job(3, std::move(shapes));
    How how;
    how.codec = codec;
    how.algorithm = "direct";
    job.all_reduce(inputs(job, 1), how);
    return job.ranks[0].traffic().frames_sent;
  };
  const std::uint64_t one_collective = frames_of({{20, 30}}, "none");
  EXPECT_EQ(frames_of({{1, 600}}), one_collective);
  EXPECT_EQ(frames_of({{20, 30}}), 2 * one_collective);
  EXPECT_EQ(frames_of({{20, 30}, {25, 20}, {1, 7}}), 2 * one_collective);
}

TEST(LowRank, ResultsDoNotDependOnOtherArraysOfTheCallNorOnPlace) {
  Job alone(3, {{24, 40}}), together(3, kShapes);
  const auto x = inputs(together, 1);
  std::vector<Values> first;
  for (const Values& each : x) first.emplace_back(each.begin(), each.begin() + 24 * 40);
  How here, elsewhere;
  here.algorithm = elsewhere.algorithm = "recursive_doubling";  // auto goes by the call's size
  elsewhere.in_place = false;
  const Values y = alone.all_reduce(first, elsewhere)[0], all = together.all_reduce(x, here)[0];
  EXPECT_TRUE(same_bits(y, Values(all.begin(), all.begin() + 24 * 40)));
}

TEST(LowRank, OneRankAloneDeliversInputAndResidual) {
  Job job(1, kShapes);
  const auto x = inputs(job, 1), residual = inputs(job, 2);
  std::size_t at = 0;
  for (const auto& key : job.keys) {
    job.feedback[0]->add(key.key,
                         Values(residual[0].begin() + static_cast<std::ptrdiff_t>(at),
                                residual[0].begin() + static_cast<std::ptrdiff_t>(at + key.count)));
    at += key.count;
  }
  Values expected = x[0];
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += residual[0][i];
  EXPECT_TRUE(same_bits(job.all_reduce(x)[0], expected));
  EXPECT_EQ(job.residual(0), Values(job.count()));
}

TEST(LowRank, VectorsTravelAsTheyAre) {
  Job job(3, {{1, 300}, {300, 1}, {5, 2}});
  const auto x = inputs(job, 1);
  How plain;
  plain.codec = "none";
  EXPECT_TRUE(same_bits(job.all_reduce(x)[0], job.all_reduce(x, plain)[0]));
}

TEST(LowRank, TheAverageIsTheSumDivided) {
  Job sum(3, kShapes), average(3, kShapes);
  for (unsigned call = 0; call < 3; ++call) {
    const auto x = inputs(sum, call);
    How how;
    const Values s = sum.all_reduce(x, how)[0];
    how.op = ReduceOp::kAvg;
    const Values a = average.all_reduce(x, how)[0];
    for (std::size_t i = 0; i < s.size(); ++i) ASSERT_EQ(a[i], s[i] * static_cast<float>(1.0 / 3));
    for (std::size_t r = 0; r < 3; ++r) EXPECT_EQ(sum.residual(r), average.residual(r));
  }
}

// Nothing is left for the residual, however the ranks share a matrix of low rank.
TEST(LowRank, MatricesOfItsRankArriveWhole) {
  const Shapes shapes = {{40, 50}, {70, 20}};
  Job job(4, shapes);
  Values whole = matrix_of_rank(shapes[0], 2, 1);
  const Values other = matrix_of_rank(shapes[1], 2, 11);
  whole.insert(whole.end(), other.begin(), other.end());
  for (unsigned call = 0; call < 4; ++call) {
    std::vector<Values> x(4, whole);
    for (std::size_t r = 0; r < 4; ++r)
      for (float& each : x[r]) each *= static_cast<float>(r + call + 1);
    Values expected = whole;
    for (float& each : expected) each *= static_cast<float>(10 + 4 * call);
    EXPECT_LT(norm(difference(job.all_reduce(x)[0], expected)), 1e-5 * norm(expected));
  }
  for (std::size_t r = 0; r < 4; ++r) EXPECT_LT(norm(job.residual(r)), 1e-4 * norm(whole));
}

// What is left behind comes later: the mean of what is delivered tends to the matrix.
TEST(LowRank, EverythingArrivesInTheEnd) {
  const Shape shape{30, 40};
  Job job(2, {shape});
  const Values x = matrix_of_rank(shape, 8, 1, 0.7F);
  Values mean(x.size());
  constexpr int kCalls = 60;
  double once = 0;
  for (int call = 0; call < kCalls; ++call) {
    const Values y = job.all_reduce({x, x})[0];
    for (std::size_t i = 0; i < y.size(); ++i) mean[i] += y[i] / (2 * kCalls);
    if (call == 0) once = norm(difference(mean, x)) / norm(x);
  }
  EXPECT_GT(once, 0.2);
  EXPECT_LT(norm(difference(mean, x)), 0.08 * norm(x));
}

// The directions of the last call are those of the next: a call that begins with them comes nearer.
TEST(LowRank, BeginsWhereTheLastCallEnded) {
  const Shape shape{60, 60};
  const Values x = matrix_of_rank(shape, 20, 1, 0.8F);
  Job job(2, {shape});
  const auto forget_residual = [&] {
    for (auto& each : job.feedback) {
      auto state = each->save();
      state["key0"].residual.clear();
      each->load(state);
    }
  };
  const auto error = [&] {
    const Values y = job.all_reduce({x, x})[0];
    Values twice = x;
    for (float& each : twice) each *= 2;
    forget_residual();
    return norm(difference(y, twice));
  };
  const double cold = error();
  double warm = 0;
  for (int call = 0; call < 5; ++call) warm = error();
  EXPECT_LT(warm, 0.98 * cold);
  for (auto& each : job.feedback) {
    auto state = each->save();
    EXPECT_EQ(state["key0"].memory.size(), 2 * shape.columns);
    state["key0"].memory.clear();
    each->load(state);
  }
  EXPECT_EQ(error(), cold);
}

TEST(LowRank, RanksThatBeginDifferentlyAgreeAndLoseNothing) {
  Job job(3, kShapes);
  for (std::size_t r = 0; r < 3; ++r) {
    ErrorFeedback::State state;
    for (std::size_t i = 0; i < kShapes.size(); ++i)
      state[job.keys[i].key].memory = normal(2 * kShapes[i].columns, 7 + static_cast<unsigned>(r));
    job.feedback[r]->load(state);
  }
  Books books;
  for (unsigned call = 0; call < 3; ++call) {
    const auto x = inputs(job, call);
    const auto y = job.all_reduce(x);
    expect_agreement(y);
    books.record(x, y[0]);
  }
  books.expect_balanced(job, 9, "different beginnings");
}

TEST(LowRank, ASavedStateGoesOnAsIfNothingHadHappened) {
  Job whole(2, kShapes), resumed(2, kShapes);
  for (unsigned call = 0; call < 3; ++call) whole.all_reduce(inputs(whole, call));
  for (std::size_t r = 0; r < 2; ++r) resumed.feedback[r]->load(whole.feedback[r]->save());
  for (unsigned call = 3; call < 6; ++call) {
    const auto x = inputs(whole, call);
    EXPECT_TRUE(same_bits(whole.all_reduce(x)[1], resumed.all_reduce(x)[1]));
  }
}

TEST(LowRank, OneNanAnywhereIsNanEverywhereAndMovesNothing) {
  Job job(3, kShapes), spared(3, kShapes);
  const auto before = inputs(job, 1), after = inputs(job, 2);
  job.all_reduce(before);
  spared.all_reduce(before);
  for (std::string_view algorithm : schedule::algorithms(Collective::kAllReduce))
    for (float bad : {NAN, INFINITY, -INFINITY})
      for (std::size_t at : {std::size_t{5}, std::size_t{24 * 40 + 10}, job.count() - 1}) {
        auto x = inputs(job, 3);
        x[1][at] = bad;
        for (const Values& each : job.all_reduce(x, {.algorithm = std::string(algorithm)}))
          EXPECT_TRUE(std::ranges::all_of(each, [](float y) { return std::isnan(y); }));
        for (std::size_t r = 0; r < 3; ++r) EXPECT_EQ(job.residual(r), spared.residual(r));
      }
  EXPECT_TRUE(same_bits(job.all_reduce(after)[0], spared.all_reduce(after)[0]));
}

TEST(LowRank, ZeroHugeAndDenormalMatricesStayFiniteAndAgree) {
  for (float scale : {0.0F, 1e-41F, 1e-30F, 1e30F, 5e37F}) {
    Job job(3, kShapes);
    Books books;
    for (unsigned call = 0; call < 3; ++call) {
      auto x = inputs(job, call);
      for (Values& each : x)
        for (float& value : each) value = scale * std::clamp(value, -1.0F, 1.0F);
      const auto y = job.all_reduce(x);
      expect_agreement(y);
      for (float each : y[0]) ASSERT_TRUE(std::isfinite(each)) << scale;
      books.record(x, y[0]);
    }
    for (std::size_t r = 0; r < 3; ++r)
      for (float each : job.residual(r)) ASSERT_TRUE(std::isfinite(each)) << scale;
    if (scale < 5e37F) books.expect_balanced(job, 9, std::to_string(scale));
  }
}

// A rank leaves, and its residual is taken over by another.
TEST(LowRank, NothingIsLostWhenRanksLeaveAndCome) {
  std::vector<std::shared_ptr<ErrorFeedback>> feedback;
  Books books;
  unsigned call = 0;
  for (int size : {4, 3, 1, 2, 5, 2}) {
    Job job(size, kShapes);
    for (; feedback.size() > job.size(); feedback.pop_back())
      for (const auto& key : job.keys)
        feedback.front()->add(key.key, feedback.back()->residual(key.key));
    std::ranges::copy(feedback, job.feedback.begin());
    feedback = job.feedback;
    for (const std::size_t rank : {1, 3, 2}) {
      How how;
      how.codec = "lowrank:rank=" + std::to_string(rank);
      const auto x = inputs(job, ++call);
      const auto y = job.all_reduce(x, how);
      expect_agreement(y);
      books.record(x, y[0]);
    }
    Books now = books;
    now.expect_balanced(job, 5 * call, "p=" + std::to_string(size));
  }
}

TEST(LowRank, WorksWithoutFeedback) {
  Job job(3, kShapes);
  How how;
  how.feeds_back = false;
  for (bool in_place : {true, false}) {
    how.in_place = in_place;
    const auto y = job.all_reduce(inputs(job, 1), how);
    expect_agreement(y);
    how.feeds_back = true;
    Job other(3, kShapes);
    EXPECT_TRUE(same_bits(other.all_reduce(inputs(job, 1), how)[0], y[0])) << "its first call";
    how.feeds_back = false;
  }
}

TEST(LowRank, SeveralArraysMayShareAKey) {
  Job apart(2, {{20, 30}, {9, 1}, {15, 25}}), shared(2, apart.shapes);
  shared.keys = {{"all", shared.count()}};
  for (unsigned call = 0; call < 4; ++call) {
    const auto x = inputs(apart, call);
    EXPECT_TRUE(same_bits(apart.all_reduce(x)[0], shared.all_reduce(x)[0]));
  }
  EXPECT_EQ(shared.feedback[0]->save()["all"].memory.size(), std::size_t{2 * (30 + 25)});
}

// While an earlier call waits for another rank: the sum of input and residual is in its place.
TEST(LowRank, TheFirstLocalWorkIsDoneWhenACallIsSubmitted) {
  Job job(2, {{20, 30}});
  const Values residual = normal(600, 1);
  for (auto& each : job.feedback) each->add("key0", residual);
  std::vector<Values> x = inputs(job, 2), y(2, Values(600));
  std::vector<float> early(2, 1);
  const auto submit = [&](std::size_t r) {
    Array first{reinterpret_cast<std::byte*>(&early[r]), 1}, in = array_of(x[r]),
                                                             out = array_of(y[r]);
    Request before, call;
    before.inputs = before.outputs = {&first, 1};
    call.codec = codec::make_codec("lowrank");
    call.feedback = job.feedback[r];
    call.keys = job.keys;
    call.shapes = job.shapes;
    call.inputs = {&in, 1};
    call.outputs = {&out, 1};
    Communicator& comm = job.ranks[static_cast<int>(r)];
    comm.submit(before);
    return comm.submit(call);
  };
  const auto work = submit(0);
  Values sum = x[0];
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += residual[i];
  EXPECT_TRUE(same_bits(y[0], sum));
  const auto other = submit(1);
  job.ranks[0].wait(*work, 10);
  job.ranks[1].wait(*other, 10);
  expect_agreement(y);
}

TEST(LowRank, RefusesWhatItCannotDo) {
  Job job(2, {{4, 6}});
  Values x(24);
  Array array = array_of(x);
  Shape shape{4, 6};
  Request call;
  call.codec = codec::make_codec("lowrank");
  call.inputs = call.outputs = {&array, 1};
  call.shapes = {&shape, 1};
  for (const Shape bad : {Shape{4, 5}, Shape{0, 24}, Shape{5, 5}, Shape{std::size_t{1} << 63, 2}}) {
    shape = bad;
    EXPECT_THROW(job.ranks[0].submit(call), InvalidArgument);
  }
  shape = {4, 6};
  const Shape two[] = {{2, 6}, {2, 6}};
  call.shapes = two;
  EXPECT_THROW(job.ranks[0].submit(call), InvalidArgument);
  call.shapes = {&shape, 1};
  call.op = ReduceOp::kMax;
  EXPECT_THROW(job.ranks[0].submit(call), InvalidArgument);
  call.op = ReduceOp::kSum;
  call.collective = Collective::kReduce;
  EXPECT_THROW(job.ranks[0].submit(call), ScheduleError);
  call.collective = Collective::kAllReduce;
  call.algorithm = "gather";
  try {
    job.ranks[0].submit(call);
    FAIL() << "gathered";
  } catch (const ScheduleError& error) {
    EXPECT_NE(std::string(error.what()).find("codec 'lowrank'"), std::string::npos);
  }
  EXPECT_THROW(codec::make_codec("lowrank:rank=0"), InvalidArgument);
  EXPECT_THROW(codec::make_codec("lowrank:rank=33"), InvalidArgument);
  EXPECT_THROW(codec::make_codec("lowrank:rank=1.5"), InvalidArgument);
  EXPECT_EQ(codec::make_codec("lowrank:rank=3")->name(), "lowrank:rank=3");
}

}  // namespace exec_lowrank_test
}  // namespace gradwire::exec
