// What a call sends, counted where it leaves a rank: the textbook's messages and bytes, and beyond
// them one header for each segment of a message.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>
#include <string>

#include "exec_ranks.h"
#include "gradwire/schedule/frames.h"
#include "gradwire/schedule/generators.h"

namespace gradwire::exec {
namespace exec_traffic_test {

constexpr int kSegment = 16 * 1024;
constexpr int kEven = 64 * 840;  // bytes: cache lines that 2 to 8 ranks can share evenly

// An all_reduce of n bytes by the papers: messages and bytes of all ranks, and the largest message.
// Ranks beyond a power of two fold into the others, and get the sum in the end.
struct Textbook {
  std::string_view algorithm;
  int messages;
  double bytes;    // in n
  double largest;  // in n
};

std::vector<Textbook> textbooks(int p) {
  const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(p)));
  const int folds = 2 * (p - core), log2 = std::countr_zero(static_cast<unsigned>(core));
  const double in_tree = 2.0 * (p - 1);  // up a tree of all ranks, and down
  const int trees = p == 2 ? 1 : 2;      // both trees of two ranks are one edge
  return {
      {"ring", 2 * p * (p - 1), in_tree, 1.0 / p},
      {"direct", 2 * p * (p - 1), in_tree, 1.0 / p},
      {"halving_doubling", 2 * core * log2 + folds, in_tree, folds > 0 ? 1 : 0.5},
      {"recursive_doubling", core * log2 + folds, 1.0 * core * log2 + folds, 1},
      {"star", 2 * (p - 1), in_tree, 1},
      {"binary_tree", 2 * (p - 1), in_tree, 1},
      {"double_binary_tree", 2 * trees * (p - 1), in_tree, 1.0 / trees},
      {"gather(direct)", p * (p - 1), 1.0 * p * (p - 1), 1},
  };
}

// Payload and frames of every rank in one call; fails where a later one sends anything else.
std::vector<Traffic> sent_by(Ranks& ranks, std::string_view algorithm, std::size_t elements) {
  std::vector<Traffic> sent(static_cast<std::size_t>(ranks.size()));
  ranks.run([&](Communicator& comm) {
    std::vector<float> x(elements, 1);
    const Array array = array_of(x);
    Request call;
    call.algorithm = algorithm;
    call.inputs = call.outputs = {&array, 1};
    for (int i = 0; i < 4; ++i) {
      const Traffic before = comm.traffic();
      if (i % 2 == 0)
        comm.run(call);
      else
        comm.wait(*comm.begin(call), 30);
      const std::uint64_t frames = comm.traffic().frames_sent - before.frames_sent;
      const std::uint64_t bytes = comm.traffic().bytes_sent - before.bytes_sent;
      const Traffic found = {bytes - frames * sizeof(FrameHeader), frames, {}};
      Traffic& first = sent[static_cast<std::size_t>(comm.identity().rank)];
      if (i == 0) first = found;
      EXPECT_EQ(found.frames_sent, first.frames_sent) << algorithm << ", call " << i;
      EXPECT_EQ(found.bytes_sent, first.bytes_sent) << algorithm << ", call " << i;
    }
  });
  return sent;
}

Traffic total(const std::vector<Traffic>& sent) {
  Traffic all;
  for (const Traffic& each : sent) {
    all.bytes_sent += each.bytes_sent;
    all.frames_sent += each.frames_sent;
  }
  return all;
}

class TrafficOf : public testing::TestWithParam<int> {
 protected:
  Ranks ranks_{GetParam(), "shm", Travel{.segment_bytes = kSegment}.tuning()};
};

TEST_P(TrafficOf, EveryAlgorithmHasATextbook) {
  std::set<std::string_view> known;
  for (const Textbook& each : textbooks(GetParam())) known.insert(each.algorithm);
  for (std::string_view each : schedule::algorithms(Collective::kAllReduce))
    EXPECT_TRUE(known.contains(each)) << each;
}

TEST_P(TrafficOf, AnElementIsOneFrameAMessage) {
  for (const Textbook& each : textbooks(GetParam())) {
    const Traffic all = total(sent_by(ranks_, each.algorithm, 1));
    EXPECT_EQ(all.frames_sent, each.messages) << each.algorithm;
    EXPECT_EQ(all.bytes_sent, each.bytes * sizeof(float)) << each.algorithm;
  }
}

// Returns the frames of all messages of n bytes: those of few chunks beside others have fewer.
std::uint64_t frames_of(const Textbook& book, int p, int n) {
  const double largest = book.largest * n;
  const int segments = static_cast<int>(std::ceil(largest / kSegment));
  if (book.algorithm != "halving_doubling")
    return static_cast<std::uint64_t>(book.messages) * segments;
  const auto schedule =
      schedule::generate({Collective::kAllReduce, std::string(book.algorithm), p, 0, {}});
  const double chunk = static_cast<double>(n) / schedule.chunks;
  const schedule::Cut cut = schedule::cut_into(segments, chunk, largest);
  int frames = 0;
  for (const auto& round : schedule.rounds)
    for (const auto& edge : round) frames += cut.frames_of(edge.chunks.size());
  return static_cast<std::uint64_t>(frames);
}

TEST_P(TrafficOf, ManyElementsAreTheClosedFormInSegments) {
  for (const int n : {kEven, 10 * kEven})
    for (const Textbook& each : textbooks(GetParam())) {
      const auto sent = sent_by(ranks_, each.algorithm, n / sizeof(float));
      EXPECT_EQ(total(sent).frames_sent, frames_of(each, GetParam(), n)) << each.algorithm;
      EXPECT_EQ(total(sent).bytes_sent, each.bytes * n) << each.algorithm;
      const auto most = std::ranges::max(sent, {}, &Traffic::bytes_sent).bytes_sent;
      const auto form = schedule::closed_form(
          {Collective::kAllReduce, std::string(each.algorithm), GetParam(), 0, {}});
      const double share = form ? form->max_sent : GetParam() - 1;  // what is gathered has none
      EXPECT_DOUBLE_EQ(static_cast<double>(most), share * n) << each.algorithm;
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TrafficOf, testing::Values(2, 3, 4, 5, 6, 8));

}  // namespace exec_traffic_test
}  // namespace gradwire::exec
