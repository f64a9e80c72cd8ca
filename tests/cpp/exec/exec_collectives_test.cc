// Every collective on every algorithm that has it, on threads, against plain arithmetic.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "exec_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/schedule/generators.h"

namespace gradwire::exec {
namespace exec_collectives_test {

constexpr int kSizes[] = {1, 2, 3, 4, 5, 8};
constexpr std::size_t kLengths[] = {0, 1, 5, 1000, 70001};

// Small integers: exact in float32, so that order doesn't matter.
float value(Rank rank, std::size_t i) {
  return static_cast<float>(static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 13) % 31) -
                            15);
}

std::vector<float> input(Rank rank, std::size_t n) {
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = value(rank, i);
  return x;
}

std::vector<float> sum(int ranks, std::size_t n) {
  std::vector<float> total(n, 0);
  for (Rank r = 0; r < ranks; ++r)
    for (std::size_t i = 0; i < n; ++i) total[i] += value(r, i);
  return total;
}

Request request(Collective collective, std::string_view algorithm, std::span<const Array> in,
                std::span<const Array> out) {
  Request r;
  r.collective = collective;
  r.algorithm = algorithm;
  r.inputs = in;
  r.outputs = out;
  r.timeout = 30;
  return r;
}

std::vector<Array> blocks(std::vector<float>& all, int parts) {
  std::vector<Array> out;
  const std::size_t n = all.size() / static_cast<std::size_t>(parts);
  for (int i = 0; i < parts; ++i)
    out.push_back({reinterpret_cast<std::byte*>(all.data() + static_cast<std::size_t>(i) * n), n});
  return out;
}

class Collectives : public testing::TestWithParam<int> {};

TEST_P(Collectives, AllReduceIsTheSumWithEveryAlgorithm) {
  Ranks ranks(GetParam());
  auto algorithms = schedule::algorithms(Collective::kAllReduce);
  algorithms.insert(algorithms.end(), {"auto", "gather", "gather(ring)"});
  for (std::string_view algorithm : algorithms) {
    for (std::size_t n : kLengths) {
      ranks.run([&](Communicator& comm) {
        std::vector<float> x = input(comm.identity().rank, n);
        const Array arrays[] = {array_of(x)};
        comm.run(request(Collective::kAllReduce, algorithm, arrays, arrays));
        EXPECT_EQ(x, sum(comm.identity().size, n)) << algorithm << " n=" << n;
      });
    }
  }
}

// Several arrays of every dtype, and of none: x0 op x1 op ..., then what avg divides by.
TEST_P(Collectives, GatheredInputsAreAddedInTheOrderOfTheRanks) {
  const int p = GetParam();
  Ranks ranks(p);
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProd}) {
    const auto of = [](Rank r, std::size_t i) { return 1 + 0.1F / float(r + 3) + float(i % 7); };
    const auto result = [&](std::size_t i) {
      float y = of(0, i);
      for (Rank r = 1; r < p; ++r) y = op == ReduceOp::kProd ? y * of(r, i) : y + of(r, i);
      return op == ReduceOp::kAvg && p > 1 ? y * float(1.0 / p) : y;
    };
    ranks.run([&](Communicator& comm) {
      std::vector<float> whole(100), none, apart(37), expected(100);
      for (std::size_t i = 0; i < whole.size(); ++i) {
        whole[i] = of(comm.identity().rank, i);
        expected[i] = result(i);
      }
      const auto kept = whole;
      const Array in[] = {{reinterpret_cast<std::byte*>(whole.data()), 63},
                          array_of(none),
                          {reinterpret_cast<std::byte*>(whole.data() + 63), 37}};
      const Array out[] = {in[0], in[1], array_of(apart)};
      Request call = request(Collective::kAllReduce, "gather", in, out);
      call.op = op;
      comm.run(call);
      EXPECT_TRUE(std::equal(whole.begin(), whole.begin() + 63, expected.begin()));
      EXPECT_TRUE(std::equal(whole.begin() + 63, whole.end(), kept.begin() + 63));
      EXPECT_TRUE(same_bits(apart, {expected.begin() + 63, expected.end()}));
    });
  }
}

TEST_P(Collectives, ReduceScatterAndAllGatherAreInverse) {
  const int p = GetParam();
  Ranks ranks(p);
  for (std::string_view algorithm : schedule::algorithms(Collective::kReduceScatter)) {
    for (std::size_t n : kLengths) {
      const std::size_t total = n * static_cast<std::size_t>(p);
      ranks.run([&](Communicator& comm) {
        const auto me = static_cast<std::size_t>(comm.identity().rank);
        std::vector<float> x = input(comm.identity().rank, total), part(n), back(total);
        const auto kept = x;
        const auto in = blocks(x, p), out = blocks(back, p);
        const Array own[] = {array_of(part)};
        comm.run(request(Collective::kReduceScatter, algorithm, in, own));
        EXPECT_EQ(x, kept) << "reduce_scatter changed its input";
        const auto expected = sum(p, total);
        EXPECT_TRUE(std::equal(part.begin(), part.end(), expected.begin() + long(me * n)))
            << algorithm;
        comm.run(request(Collective::kAllGather, algorithm, own, out));
        EXPECT_EQ(back, expected) << algorithm;
      });
    }
  }
}

TEST_P(Collectives, RootedOnesWorkFromEveryRoot) {
  const int p = GetParam();
  Ranks ranks(p);
  for (Rank root = 0; root < p; ++root) {
    for (std::size_t n : kLengths) {
      for (std::string_view algorithm : schedule::algorithms(Collective::kReduce)) {
        ranks.run([&](Communicator& comm) {
          const Rank me = comm.identity().rank;
          std::vector<float> x = input(me, n), result(n), copy = input(root, n);
          const Array in[] = {array_of(x)}, out[] = {array_of(result)};
          Request reduce = request(Collective::kReduce, algorithm, in, out);
          reduce.root = root;
          if (me != root) reduce.outputs = {};
          comm.run(reduce);
          EXPECT_EQ(x, input(me, n)) << "reduce changed its input";
          if (me == root) {
            EXPECT_EQ(result, sum(p, n)) << algorithm;
          }
          if (me != root) copy.assign(n, -1);
          const Array whole[] = {array_of(copy)};
          Request broadcast = request(Collective::kBroadcast, algorithm, whole, whole);
          broadcast.root = root;
          if (me != root) broadcast.inputs = {};
          comm.run(broadcast);
          EXPECT_EQ(copy, input(root, n)) << algorithm;
        });
      }
    }
  }
}

TEST_P(Collectives, GatherScatterAndAllToAllMoveUnevenBlocks) {
  const int p = GetParam();
  Ranks ranks(p);
  const auto length = [](Rank from, Rank to) {
    return static_cast<std::size_t>(from * 40000 + to * 7);
  };
  for (std::string_view algorithm : schedule::algorithms(Collective::kAllToAll)) {
    ranks.run([&](Communicator& comm) {
      const Rank me = comm.identity().rank;
      std::vector<std::vector<float>> in, out;
      std::vector<Array> in_arrays, out_arrays;
      for (Rank r = 0; r < p; ++r) in.push_back(input(me, length(me, r)));
      for (Rank r = 0; r < p; ++r) out.emplace_back(length(r, me));
      for (auto& each : in) in_arrays.push_back(array_of(each));
      for (auto& each : out) out_arrays.push_back(array_of(each));
      comm.run(request(Collective::kAllToAll, algorithm, in_arrays, out_arrays));
      for (Rank r = 0; r < p; ++r)
        EXPECT_EQ(out[static_cast<std::size_t>(r)], input(r, length(r, me))) << algorithm;
      // Back to where they came from, by gather and scatter through rank p-1.
      std::vector<float> own = input(me, length(me, 0)), returned(own.size());
      std::vector<std::vector<float>> all;
      std::vector<Array> all_arrays;
      for (Rank r = 0; r < p; ++r) all.emplace_back(length(r, 0));
      for (auto& each : all) all_arrays.push_back(array_of(each));
      const Array one[] = {array_of(own)}, two[] = {array_of(returned)};
      Request gather = request(Collective::kGather, "star", one, all_arrays);
      Request scatter = request(Collective::kScatter, "star", all_arrays, two);
      gather.root = scatter.root = p - 1;
      if (me != p - 1) gather.outputs = scatter.inputs = {};
      comm.run(gather);
      comm.run(scatter);
      EXPECT_EQ(returned, own);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Collectives, testing::ValuesIn(kSizes));

TEST(AllReduce, SeveralArraysAreOneOperation) {
  Ranks ranks(3);
  ranks.run([](Communicator& comm) {
    const Rank me = comm.identity().rank;
    std::vector<float> a = input(me, 100), b, c = input(me, 50001), d = input(me, 3);
    const Array arrays[] = {array_of(a), array_of(b), array_of(c), array_of(d)};
    const auto before = comm.traffic().frames_sent;
    comm.run(request(Collective::kAllReduce, "ring", arrays, arrays));
    EXPECT_EQ(a, sum(3, 100));
    EXPECT_EQ(c, sum(3, 50001));
    EXPECT_EQ(d, sum(3, 3));
    EXPECT_LE(comm.traffic().frames_sent - before, 40U);
  });
}

TEST(AllReduce, AverageAndLossyCodecsAgreeOnEveryRank) {
  for (int p : {2, 3, 4, 5, 8}) {
    Ranks ranks(p);
    for (const char* codec : {"none", "fp16", "bf16"}) {
      for (const char* algorithm :
           {"ring", "halving_doubling", "binary_tree", "double_binary_tree", "star", "direct"}) {
        std::vector<std::vector<float>> results(static_cast<std::size_t>(p));
        const auto spec = codec::make_codec(codec);
        ranks.run([&](Communicator& comm) {
          const Rank me = comm.identity().rank;
          std::vector<float> x(33333);
          for (std::size_t i = 0; i < x.size(); ++i)
            x[i] = std::sin(static_cast<float>(i) + static_cast<float>(me));
          const Array arrays[] = {array_of(x)};
          Request call = request(Collective::kAllReduce, algorithm, arrays, arrays);
          call.op = ReduceOp::kAvg;
          call.codec = spec;
          comm.run(call);
          results[static_cast<std::size_t>(me)] = x;
        });
        const double tolerance = std::string(codec) == "none" ? 1e-6 : 2e-2;
        for (const auto& each : results) EXPECT_EQ(each, results[0]) << codec << " " << algorithm;
        for (std::size_t i = 0; i < results[0].size(); ++i) {
          double mean = 0;
          for (int r = 0; r < p; ++r)
            mean += double{std::sin(static_cast<float>(i) + static_cast<float>(r))} / p;
          ASSERT_NEAR(results[0][i], mean, tolerance) << codec << " " << algorithm;
        }
      }
    }
  }
}

TEST(AllReduce, ReencodingOnABranchingScheduleIsRefusedAndTheCommunicatorLives) {
  Ranks ranks(4);
  ranks.run([](Communicator& comm) {
    std::vector<float> x = input(comm.identity().rank, 100);
    const Array arrays[] = {array_of(x)};
    Request call = request(Collective::kAllReduce, "recursive_doubling", arrays, arrays);
    call.codec = codec::make_codec("fp16");
    EXPECT_THROW(comm.run(call), ScheduleError);
    call.codec = nullptr;
    comm.run(call);
    EXPECT_EQ(x, sum(4, 100));
  });
}

TEST(AllReduce, SegmentSizeDoesNotChangeTheBits) {
  std::vector<std::vector<float>> results;
  for (std::size_t segment_bytes :
       {std::size_t{0}, std::size_t{100}, std::size_t{5000}, std::size_t{300000}}) {
    Tuning tuning;
    tuning.segment_bytes = segment_bytes;
    Ranks ranks(3, "inproc", tuning);
    ranks.run([&](Communicator& comm) {
      std::vector<float> x(40001);
      for (std::size_t i = 0; i < x.size(); ++i)
        x[i] = std::sin(static_cast<float>(i * 3) + static_cast<float>(comm.identity().rank));
      const Array arrays[] = {array_of(x)};
      Request call = request(Collective::kAllReduce, "ring", arrays, arrays);
      call.codec = codec::make_codec("bf16");
      comm.run(call);
      if (comm.identity().rank == 1) results.push_back(x);
    });
  }
  for (const auto& each : results) EXPECT_EQ(each, results[0]);
}

TEST(AllReduce, TrafficMatchesTheClosedForm) {
  constexpr int p = 4;
  constexpr std::size_t n = 1 << 20;
  Ranks ranks(p);
  ranks.run([](Communicator& comm) {
    std::vector<float> x = input(comm.identity().rank, n);
    const Array arrays[] = {array_of(x)};
    comm.run(request(Collective::kAllReduce, "ring", arrays, arrays));
    const Traffic traffic = comm.traffic();
    const std::uint64_t payload = 2 * (p - 1) * (n / p) * sizeof(float);
    EXPECT_EQ(traffic.bytes_sent, payload + traffic.frames_sent * sizeof(FrameHeader));
  });
}

TEST(AllReduce, AsynchronousOnesOverlapAndFinishInOrder) {
  Ranks ranks(4, "shm");
  ranks.run([](Communicator& comm) {
    const Rank me = comm.identity().rank;
    std::vector<std::vector<float>> xs;
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < 20; ++i) xs.push_back(input(me, 1 + i * 3000));
    for (auto& x : xs) {
      const Array arrays[] = {array_of(x)};
      works.push_back(comm.submit(request(Collective::kAllReduce, "auto", arrays, arrays)));
    }
    std::vector<float> last = input(me, 17);
    const Array arrays[] = {array_of(last)};
    comm.run(request(Collective::kAllReduce, "direct", arrays, arrays));
    for (auto& work : works) EXPECT_TRUE(work->done());
    for (auto& x : xs) EXPECT_EQ(x, sum(4, x.size()));
    EXPECT_EQ(last, sum(4, 17));
  });
}

TEST(Gather, BlocksOfDifferentSizesAtTheirEndsAreRefused) {
  Ranks ranks(2);
  const auto errors = ranks.outcomes([](Communicator& comm) {
    const bool root = comm.identity().rank == 0;
    std::vector<float> own(root ? 10 : 196560), first(10), second(131040);
    const Array in[] = {array_of(own)}, out[] = {array_of(first), array_of(second)};
    Request gather = request(Collective::kGather, "star", in, out);
    if (!root) gather.outputs = {};
    comm.run(gather);
    comm.close(20);
  });
  for (const auto& error : errors) EXPECT_THROW(std::rethrow_exception(error), InvalidArgument);
}

TEST(Tuning, MaxMessageHasBounds) {
  Tuning tuning;
  tuning.max_message = 64;
  EXPECT_THROW(Communicator({}, tuning), InvalidArgument);
}

}  // namespace exec_collectives_test
}  // namespace gradwire::exec
