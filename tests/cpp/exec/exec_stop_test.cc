// Requests to stop travel in the headers of frames: all ranks learn of one in the same call.
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <set>

#include "exec_ranks.h"
#include "gradwire/exec/plan/plan_cache.h"
#include "gradwire/schedule/generators.h"

namespace gradwire::exec {
namespace exec_stop_test {

using Members = std::set<Rank>;

constexpr Collective kConfirming[] = {Collective::kAllReduce, Collective::kReduceScatter,
                                      Collective::kAllGather};
constexpr std::size_t kLengths[] = {0, 1, 7, 3000};
constexpr std::size_t kSegmentBytes = 1024;

// A call of one rank, with memory of its own.
struct Call {
  std::vector<float> in, out;
  std::vector<Array> inputs, outputs;
  Request request;

  Call(Collective collective, std::string_view algorithm, int ranks, std::size_t n) {
    const auto p = static_cast<std::size_t>(ranks);
    const bool scatters = collective == Collective::kReduceScatter;
    in.assign(scatters ? n * p : n, 1);
    out.assign(collective == Collective::kAllGather ? n * p : n, 0);
    inputs = blocks(in, scatters ? p : 1);
    outputs = blocks(out, collective == Collective::kAllGather ? p : 1);
    request.collective = collective;
    request.algorithm = algorithm;
    request.inputs = inputs;
    request.outputs = outputs;
    request.timeout = 60;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  static std::vector<Array> blocks(std::vector<float>& all, std::size_t parts) {
    std::vector<Array> cut;
    const std::size_t n = all.size() / parts;
    for (std::size_t i = 0; i < parts; ++i)
      cut.push_back({reinterpret_cast<std::byte*>(all.data() + i * n), n});
    return cut;
  }
};

std::vector<std::string> algorithms(Collective collective) {
  std::vector<std::string> all{"auto"};
  for (std::string_view each : schedule::algorithms(collective)) all.emplace_back(each);
  if (collective == Collective::kAllReduce)
    all.insert(all.end(), {"hierarchical(ring,halving_doubling)", "gather", "gather(ring)"});
  return all;
}

// Runs the plans of all ranks in thought. Of what has arrived, a frame tells only what it waits
// for: an execution never tells less, however late frames are.
class Rumours {
 public:
  explicit Rumours(std::vector<std::shared_ptr<const Plan>> plans) : plans_(std::move(plans)) {
    for (Rank r = 0; r < size(); ++r) heard_.push_back({Members{r}});
    sent_.resize(plans_.size());
  }

  // Returns what each rank has heard of in the end; less than all if the plans get stuck.
  std::vector<Members> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (Rank r = 0; r < size(); ++r)
        while (send(r) || receive(r)) moved = true;
    }
    std::vector<Members> last;
    for (Rank r = 0; r < size(); ++r) last.push_back(heard_[at(r)].back());
    return last;
  }

 private:
  static std::size_t at(Rank r) { return static_cast<std::size_t>(r); }
  int size() const { return static_cast<int>(plans_.size()); }
  std::size_t landed(Rank r) const { return heard_[at(r)].size() - 1; }

  bool send(Rank r) {
    const Plan& plan = *plans_[at(r)];
    if (sent_[at(r)] == plan.sends().size()) return false;
    const SendFrame& frame = plan.sends()[sent_[at(r)]];
    if (landed(r) < frame.after_receives) return false;
    for (Rank peer : plan.peers(frame))
      wires_[{r, peer}].push_back(heard_[at(r)][frame.after_receives]);
    ++sent_[at(r)];
    return true;
  }

  bool receive(Rank r) {
    const Plan& plan = *plans_[at(r)];
    if (landed(r) == plan.receives().size()) return false;
    const ReceiveFrame& frame = plan.receives()[landed(r)];
    auto& wire = wires_[{plan.peers(frame)[0], r}];
    if (sent_[at(r)] < frame.after_sends || wire.empty()) return false;
    Members all = heard_[at(r)].back();
    all.merge(wire.front());
    wire.pop_front();
    heard_[at(r)].push_back(std::move(all));
    return true;
  }

  std::vector<std::shared_ptr<const Plan>> plans_;
  std::vector<std::size_t> sent_;
  std::vector<std::vector<Members>> heard_;  // by rank: of whom, after so many frames
  std::map<std::pair<Rank, Rank>, std::deque<Members>> wires_;
};

TEST(Stop, EveryRankHearsOfAllInEachPlanThatConfirmsThem) {
  for (int p = 1; p <= 13; ++p)
    for (Collective collective : kConfirming)
      for (const std::string& algorithm : algorithms(collective))
        for (std::size_t n : kLengths) {
          std::vector<std::shared_ptr<const Plan>> plans;
          Members everybody;
          for (Rank r = 0; r < p; ++r) {
            const Call call(collective, algorithm, p, n);
            PlanCache cache({r, p, two_hosts(p), kUsualFrame, kSegmentBytes});
            plans.push_back(cache.find(call.request, std::vector<int>(p, 0)));
            EXPECT_TRUE(plans.back()->confirms_all_ranks());
            everybody.insert(r);
          }
          EXPECT_EQ(Rumours(plans).run(), std::vector<Members>(p, everybody))
              << algorithm << " " << name_of(collective) << " p=" << p << " n=" << n;
        }
}

TEST(Stop, OtherPlansAskNobody) {
  for (Collective collective : {Collective::kBroadcast, Collective::kReduce, Collective::kGather,
                                Collective::kScatter, Collective::kAllToAll}) {
    const std::size_t blocks_in =
        collective == Collective::kScatter || collective == Collective::kAllToAll ? 2 : 1;
    const std::size_t blocks_out =
        collective == Collective::kGather || collective == Collective::kAllToAll ? 2 : 1;
    std::vector<float> in(8), out(8);
    const auto inputs = Call::blocks(in, blocks_in), outputs = Call::blocks(out, blocks_out);
    Request request;
    request.collective = collective;
    request.inputs = inputs;
    request.outputs = outputs;
    PlanCache cache({0, 2, two_hosts(2), kUsualFrame, 0});
    EXPECT_FALSE(cache.find(request, {0, 0})->confirms_all_ranks()) << name_of(collective);
  }
}

// A rank asks just before one of its calls: it is that call in which all ranks agree.
TEST(Stop, AllRanksAgreeInTheCallBeforeWhichOneAsked) {
  constexpr int kCalls = 4;
  unsigned pick = 0;
  for (int p : {1, 2, 3, 5})
    for (Collective collective : kConfirming)
      for (const std::string& algorithm : algorithms(collective)) {
        const auto asks = static_cast<Rank>(pick++ % static_cast<unsigned>(p));
        const int when = static_cast<int>(pick % kCalls);
        const Travel travel{.transport = any_transport(static_cast<int>(pick)), .delays = true};
        Ranks ranks(p, travel.transport, travel.tuning(), two_hosts(p));
        ranks.run([&](Communicator& comm) {
          const Rank me = comm.identity().rank;
          for (int i = 0; i < kCalls; ++i) {
            if (me == asks && i == when) comm.request_stop();
            travel.delay(me, pick * kCalls + static_cast<unsigned>(i));
            const Call call(collective, algorithm, p, kLengths[i]);
            comm.run(call.request);
            EXPECT_EQ(comm.should_stop(), i >= when) << algorithm << " p=" << p << " call " << i;
          }
        });
      }
}

// The same for requests to resize, beside those to stop: neither is taken for the other.
TEST(Stop, ARequestToResizeTravelsBesideOneToStop) {
  constexpr int kRanks = 3, kCalls = 6, kResize = 2, kStop = 4;
  for (Rank asks = 0; asks < kRanks; ++asks) {
    Ranks ranks(kRanks, any_transport(asks));
    ranks.run([&](Communicator& comm) {
      const Rank me = comm.identity().rank;
      for (int i = 0; i < kCalls; ++i) {
        if (me == asks && i == kResize) comm.request_resize();
        if (me != asks && i == kStop) comm.request_stop();
        const Call call(kConfirming[i % 3], "auto", kRanks, 1000);
        comm.run(call.request);
        EXPECT_EQ(comm.should_resize(), i >= kResize) << "call " << i;
        EXPECT_EQ(comm.should_stop(), i >= kStop) << "call " << i;
      }
    });
  }
}

// Whenever the request comes, all ranks find the same, also while calls are under way.
TEST(Stop, AllRanksAgreeWheneverOneIsAsked) {
  constexpr int kRanks = 3, kSteps = 60, kBuckets = 3;
  const auto asked = std::make_shared<StopRequest>();  // as a process's, whose ranks are threads
  Tuning tuning;
  tuning.stop_request = asked;
  std::vector<int> stopped(kRanks, kSteps);
  Ranks ranks(kRanks, "shm", tuning);
  ranks.run([&](Communicator& comm) {
    const Rank me = comm.identity().rank;
    std::vector<std::unique_ptr<Call>> calls;
    for (int step = 0; step < kSteps; ++step) {
      std::vector<std::shared_ptr<Work>> works;
      for (int bucket = 0; bucket < kBuckets; ++bucket) {
        calls.push_back(
            std::make_unique<Call>(Collective::kAllReduce, "ring", kRanks, kLengths[bucket]));
        works.push_back(comm.submit(calls.back()->request));
        if (me == step % kRanks && step >= kSteps / 2) asked->make();
      }
      const bool stop = comm.should_stop();
      for (const auto& each : works) EXPECT_TRUE(each->done());
      if (stop) {
        stopped[static_cast<std::size_t>(me)] = step;
        return;
      }
    }
  });
  EXPECT_GE(stopped[0], kSteps / 2);
  EXPECT_LT(stopped[0], kSteps);
  EXPECT_EQ(stopped, std::vector<int>(kRanks, stopped[0]));
}

// Calls of several phases: each of them carries it.
TEST(Stop, CompoundsCarryIt) {
  for (const char* codec : {"onebit", "topk:density=0.1", "lowrank:rank=2"})
    for (Rank asks = 0; asks < 3; ++asks) {
      Ranks ranks(3);
      ranks.run([&](Communicator& comm) {
        const Rank me = comm.identity().rank;
        std::vector<float> x(600, 1.5F);
        const Array arrays[] = {array_of(x)};
        const Shape shapes[] = {{20, 30}};
        Request request;
        request.codec = codec::make_codec(codec);
        request.algorithm =
            request.codec->combine() == codec::Combine::kCompound ? "auto" : "gather";
        request.inputs = request.outputs = arrays;
        request.shapes = shapes;
        for (int i = 0; i < 3; ++i) {
          if (i == 1 && me == asks) comm.request_stop();
          comm.run(request);
          EXPECT_EQ(comm.should_stop(), i >= 1) << codec;
        }
      });
    }
}

TEST(Stop, ADeadRankIsAnErrorAndNoAnswer) {
  Ranks ranks(3, "tcp", {}, {}, /*mortal=*/true);
  const auto thrown = ranks.outcomes([&](Communicator& comm) {
    const Rank me = comm.identity().rank;
    const Call first(Collective::kAllReduce, "ring", 3, 100),
        second(Collective::kAllReduce, "ring", 3, 100);
    comm.run(first.request);
    if (me == 1) return ranks.vanish(1);
    comm.request_stop();
    comm.submit(second.request);
    comm.should_stop();
    ADD_FAILURE() << "rank " << me << " got an answer";
  });
  for (Rank r : {0, 2}) {
    ASSERT_TRUE(thrown[static_cast<std::size_t>(r)]);
    EXPECT_THROW(std::rethrow_exception(thrown[static_cast<std::size_t>(r)]), TransportError);
  }
}

TEST(StopRequest, IsMadeWhenItsTimeComes) {
  StopRequest request;
  EXPECT_FALSE(request.made());
  request.make_at(4e9);  // in 2096
  EXPECT_FALSE(request.made());
  request.make_at(1);
  EXPECT_TRUE(request.made());
  request.make_at(4e9);
  request.make();
  EXPECT_TRUE(request.made());
}

}  // namespace exec_stop_test
}  // namespace gradwire::exec
