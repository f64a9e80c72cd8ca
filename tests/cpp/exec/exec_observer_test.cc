// What an observer of a communicator is told, and in which order.
#include <gtest/gtest.h>

#include <algorithm>
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
class Recorder : public Observer {
 public:
  void started() noexcept override { add("started"); }
  void phase(const Plan& plan) noexcept override {
    add("phase " + std::string(name_of(plan.spec().collective)));
  }
  void ended(const std::exception_ptr& failure) noexcept override {
    add(failure ? "failed" : "ended");
  }

  std::vector<std::string> told;

 private:
  void add(std::string what) {
    const std::lock_guard lock(mutex_);
    told.push_back(std::move(what));
  }

  std::mutex mutex_;
};

// What was told while so many ranks made one all_reduce.
std::vector<std::string> told_by(int ranks, std::string_view codec) {
  const auto recorder = std::make_shared<Recorder>();
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

using Told = std::vector<std::string>;

TEST(Observer, IsToldOfACollective) {
  EXPECT_EQ(told_by(1, "none"), (Told{"started", "phase all_reduce", "ended"}));
}

TEST(Observer, IsToldOfThePhasesOfACollectiveThatIsMadeOfOthers) {
  const Told told = told_by(2, "lowrank");
  EXPECT_EQ(told.front(), "started");
  EXPECT_EQ(told.back(), "ended");
  EXPECT_EQ(std::ranges::count(told, "started"), 2);  // one of each rank
  EXPECT_EQ(std::ranges::count(told, "ended"), 2);
  EXPECT_GE(std::ranges::count(told, "phase all_reduce"), 4);
}

TEST(Observer, IsToldOfAFailure) {
  const auto recorder = std::make_shared<Recorder>();
  Tuning tuning;
  tuning.observer = recorder;
  Ranks ranks(2, "inproc", tuning);
  std::vector<float> x(64, 1);
  const Array array = array_of(x);
  Request call;
  call.inputs = call.outputs = {&array, 1};
  call.timeout = 0.2;
  EXPECT_THROW(ranks[0].run(call), Timeout);  // rank 1, which shares the recorder, does not call
  EXPECT_EQ(recorder->told, (Told{"started", "phase all_reduce", "failed"}));
}

}  // namespace exec_observer_test
}  // namespace gradwire::exec
