// Ranks' control planes without communicators.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "gradwire/exec/control/control_plane.h"
#include "gradwire/schedule/generators.h"
#include "transport_harness.h"

namespace gradwire::exec {

inline std::shared_ptr<const Plan> plan_of(Collective collective, std::uint64_t count) {
  const auto algorithm = std::string(schedule::algorithms(collective)[0]);
  Binding binding;
  binding.spec.collective = collective;
  binding.spec.algorithm = algorithm;
  binding.spec.counts = binding.counts = {count};
  binding.codec = codec::make_codec("none");
  binding.max_message = 4096;
  return std::make_shared<const Plan>(schedule::generate({collective, algorithm, 4, 0, {}}),
                                      std::move(binding));
}

inline std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& each) {
    return each.what();
  }
}

// Four ranks' control planes in one thread: who is not asked to listen is stopped.
class Planes : public testing::Test {
 protected:
  Planes() {
    for (Rank rank = 0; rank < kRanks; ++rank)
      planes_[at(rank)] = std::make_unique<ControlPlane>(
          rank, kRanks, [this, rank] { return positions_[at(rank)]; });
    for (Rank a = 0; a < kRanks; ++a)
      for (Rank b = a + 1; b < kRanks; ++b) {
        auto [one, other] = transport::unix_ends();
        planes_[at(a)]->sockets().adopt(std::move(one), b);
        planes_[at(b)]->sockets().adopt(std::move(other), a);
      }
  }

  ControlPlane& plane(Rank rank) { return *planes_[at(rank)]; }
  void waits(Rank rank, Rank whom) {
    positions_[at(rank)] = {true, whom, 0, 0, 1, kNoPeer};
    plane(rank).announce();
  }
  void idles(Rank rank) {
    stands(rank, {});
    plane(rank).announce();
  }
  void stands(Rank rank, const Position& where) { positions_[at(rank)] = where; }
  void awaited_by_others(Rank rank, Rank job_rank) {
    positions_[at(rank)] = {};
    positions_[at(rank)].job_peer = job_rank;
    plane(rank).announce();
  }
  void poll(std::initializer_list<Rank> ranks) {
    for (Rank rank : ranks) plane(rank).poll();
  }
  // Makes a call. The others know that it is over when the rank announces where it is then.
  void call(Rank rank, Collective collective, std::uint64_t count = 10) {
    positions_[at(rank)].in_call = true;
    plane(rank).begin_call(plan_of(collective, count));
    positions_[at(rank)].in_call = false;
    plane(rank).end_call();
  }
  void fails(Rank rank, const std::exception_ptr& error) {
    plane(rank).sockets().broadcast(failure_frame(error, rank));
  }

  // What rank 0 finds while the others answer, on a thread.
  std::string inquire(const Disagreement& found) {
    std::atomic<bool> over = false;
    std::thread others([&] {
      while (!over)
        for (Rank rank = 1; rank < kRanks; ++rank) plane(rank).serve();
    });
    const std::string text = text_of(plane(0).inquire(found));
    over = true;
    others.join();
    return text;
  }

  static constexpr int kRanks = 4;

 private:
  static std::size_t at(Rank rank) { return static_cast<std::size_t>(rank); }
  std::array<Position, kRanks> positions_;
  std::array<std::unique_ptr<ControlPlane>, kRanks> planes_;
};

struct Stop {};

// Ends a wait at its first turn.
[[noreturn]] inline void stop() { throw Stop(); }

}  // namespace gradwire::exec
