// What an observer of a communicator is told, and in which order.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exec_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/exec/control/observer.h"

namespace gradwire::exec {
namespace exec_observer_test {

// Ranks that are threads may share it.
class Listener : public Observer {
 public:
  Submission submitted(const Request& request) noexcept override {
    add("submitted " + std::string(name_of(request.collective)));
    return {.at = 1, .label = 2, .bytes = 3};
  }
  void blocked(std::chrono::steady_clock::time_point) noexcept override { add("blocked"); }
  void started(const Submission& submission) noexcept override {
    add(submission.label == 2 ? "started" : "started something else");
  }
  void phase(const Plan& plan, std::uint32_t) noexcept override {
    add("phase " + std::string(name_of(plan.spec().collective)));
  }
  void moves() noexcept override {}
  void sent(const Plan&, const Frame&, std::size_t, const CodecTime&) noexcept override {
    add("sent");
  }
  void received(const Plan&, std::span<const ReceiveFrame>, std::size_t,
                const CodecTime&) noexcept override {
    add("received");
  }
  void moved(const MessageFrame& part) noexcept override { add(part.sent ? "message" : "mail"); }
  void computed(const CodecTime&) noexcept override { add("computed"); }
  void awaits(Rank peer, bool) noexcept override { awaited_ = peer; }
  void phase_over() noexcept override { add("over"); }
  void ended(const std::exception_ptr& failure) noexcept override {
    add(failure ? "failed, waiting for " + std::to_string(awaited_) : "ended");
  }

  std::vector<std::string> told;

 private:
  void add(std::string what) {
    const std::lock_guard lock(mutex_);
    told.push_back(std::move(what));
  }

  std::mutex mutex_;
  std::atomic<Rank> awaited_{kNoPeer};
};

using Told = std::vector<std::string>;

// What was told while so many ranks made one all_reduce.
Told told_by(int ranks, std::string_view codec) {
  const auto recorder = std::make_shared<Listener>();
  Tuning tuning;
  tuning.observer = recorder;
  Ranks(ranks, "inproc", tuning).run([&](Communicator& comm) {
    std::vector<float> x(64 * 64, 1);
    const Array array = array_of(x);
    const Shape shape{64, 64};
    Request call;
    call.codec = codec::make_codec(codec);
    call.inputs = call.outputs = {&array, 1};
    if (codec == "lowrank") call.shapes = {&shape, 1};
    comm.run(call);
  });
  return recorder->told;
}

TEST(Observer, IsToldOfACollective) {
  EXPECT_EQ(told_by(1, "none"), (Told{"submitted all_reduce", "started", "phase all_reduce", "over",
                                      "ended", "blocked"}));
}

TEST(Observer, IsToldOfThePhasesOfACollectiveThatIsMadeOfOthers) {
  const Told told = told_by(2, "lowrank");
  EXPECT_EQ(told.front(), "submitted all_reduce");
  EXPECT_EQ(told.back(), "blocked");
  EXPECT_EQ(std::ranges::count(told, "started"), 2);  // one of each rank
  EXPECT_EQ(std::ranges::count(told, "ended"), 2);
  EXPECT_GE(std::ranges::count(told, "phase all_reduce"), 4);
  EXPECT_EQ(std::ranges::count(told, "phase all_reduce"), std::ranges::count(told, "over"));
  EXPECT_GE(std::ranges::count(told, "computed"), 4);
  EXPECT_EQ(std::ranges::count(told, "sent"), std::ranges::count(told, "received"));
}

TEST(Observer, IsToldOfMessages) {
  const auto listener = std::make_shared<Listener>();
  Tuning tuning;
  tuning.observer = listener;
  Ranks(2, "inproc", tuning).run([&](Communicator& comm) {
    std::array<std::byte, 8> data{};
    const Rank me = comm.identity().rank;
    const auto work = me == 0 ? comm.send(data.data(), data.size(), 1, 10)
                              : comm.receive(data.data(), data.size(), 0, 10);
    comm.wait(*work, 10);
  });
  EXPECT_EQ(std::ranges::count(listener->told, "message"), 1);
  EXPECT_EQ(std::ranges::count(listener->told, "mail"), 1);
}

TEST(Observer, ComesAndGoesBetweenCalls) {
  const auto listener = std::make_shared<Listener>();
  Ranks ranks(1);
  std::vector<float> x(64, 1);
  const Array array = array_of(x);
  Request call;
  call.inputs = call.outputs = {&array, 1};
  ranks[0].run(call);
  ranks[0].observe(listener);
  EXPECT_TRUE(listener->told.empty());
  ranks[0].run(call);
  const Told once = listener->told;
  EXPECT_EQ(once.size(), 6U);
  ranks[0].observe(nullptr);
  ranks[0].run(call);
  EXPECT_EQ(listener->told, once);
  EXPECT_EQ(listener.use_count(), 1);  // nobody keeps it
}

TEST(Observer, IsToldOfAFailure) {
  const auto recorder = std::make_shared<Listener>();
  Tuning tuning;
  tuning.observer = recorder;
  Ranks ranks(2, "inproc", tuning);
  std::vector<float> x(64, 1);
  const Array array = array_of(x);
  Request call;
  call.inputs = call.outputs = {&array, 1};
  call.timeout = 0.2;
  EXPECT_THROW(ranks[0].run(call), Timeout);  // rank 1, which shares the recorder, does not call
  const Told& told = recorder->told;
  EXPECT_EQ((Told{told.begin(), told.begin() + 3}),
            (Told{"submitted all_reduce", "started", "phase all_reduce"}));
  EXPECT_EQ(std::ranges::count(told, "failed, waiting for 1"), 1);
}

}  // namespace exec_observer_test
}  // namespace gradwire::exec
