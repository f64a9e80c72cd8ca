#include "gradwire/exec/control/stall_monitor.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

#include "gradwire/exec/control/status_scan.h"

namespace gradwire::exec {
namespace {

// A rank that has not moved for so long publishes whom it waits for.
constexpr double kPublishSeconds = 1;
constexpr std::uint64_t kNever = ~std::uint64_t{0};

std::uint64_t nanoseconds(double seconds) { return static_cast<std::uint64_t>(seconds * 1e9); }

std::string name_of(Rank rank) { return "rank " + std::to_string(rank); }

std::string whole_seconds(double seconds) {
  std::ostringstream text;
  text.precision(3);
  text << seconds << " s";
  return text.str();
}

// Returns "it waits for rank 1 to send segment 0 of round 3".
std::string reason(const Wait& wait) {
  std::string text = "it waits for " + name_of(wait.peer) + (wait.reads ? " to read" : " to send");
  if (wait.activity != Activity::kCall) return text;
  return text + " segment " + std::to_string(wait.segment) + " of round " +
         std::to_string(wait.round);
}

// Describes the position that a rank announced last.
std::string describe_last_position(Rank rank, const ControlPlane::LastPosition& last) {
  if (last.received_at == ControlPlane::Clock::time_point{})
    return name_of(rank) +
           " has said nothing: it is outside gradwire, or stopped, or cannot be reached";
  const transport::ControlFrame& said = last.frame;
  if ((said.flags & transport::kElsewhere) != 0)
    return name_of(rank) + " waits in another group, for rank " + std::to_string(said.segment) +
           " of the job";
  const std::string call = "call " + std::to_string(said.calls - 1) + ", " + text_of(said);
  if (said.culprit != kNoPeer)
    return name_of(rank) + " waits for " + name_of(said.culprit) + " in " + call;
  if ((said.flags & transport::kInCall) != 0) return name_of(rank) + " is in " + call;
  return name_of(rank) + " was last heard of outside gradwire, having begun " +
         std::to_string(said.calls) + " calls";
}

}  // namespace

// Looks up what a rank does: in its status page if it is on this host, else in its last frame.
struct StallMonitor::PositionLookup {
  const StallMonitor& self;
  const ControlPlane& control;
  std::vector<RankStatus> here;

  const RankStatus* find(Rank rank) const {
    for (const RankStatus& each : here) {
      const bool same_job = self.tag_ != 0 ? each.page.tag == self.tag_ : each.pid == ::getpid();
      if (same_job && each.page.communicator == self.communicator_ && each.page.rank == rank)
        return &each;
    }
    return nullptr;
  }

  std::string describe(Rank rank) const {
    const RankStatus* seen = find(rank);
    return seen ? exec::describe(*seen)
                : describe_last_position(rank, control.last_position_of(rank));
  }

  // Returns whom a rank waits for. A stopped rank waits for nobody, whatever its page shows.
  Rank next(Rank rank) const {
    if (const RankStatus* seen = find(rank)) return seen->stopped() ? kNoPeer : seen->page.peer();
    return control.last_position_of(rank).frame.culprit;
  }

  Rank end_of_chain(Rank rank) const {
    for (int step = 0; step < self.size_; ++step) {
      const Rank waits_for = next(rank);
      if (waits_for == kNoPeer || waits_for == self.rank_) break;
      rank = waits_for;
    }
    return rank;
  }
};

StallMonitor::StallMonitor(const Identity& identity, double stall_seconds, Log log)
    : rank_(identity.rank),
      size_(identity.size),
      communicator_(identity.communicator),
      tag_(identity.tag),
      stall_seconds_(stall_seconds),
      log_(std::move(log)),
      status_(identity),
      publish_after_(nanoseconds(stall_seconds > 0 ? std::min(kPublishSeconds, stall_seconds)
                                                   : kPublishSeconds)),
      log_after_(nanoseconds(stall_seconds)) {}

void StallMonitor::report(const Wait& wait, const ControlPlane& control) {
  const bool stalled = log_after_ > 0 && coarse_now() - idle_since_ >= log_after_;
  due_at_ = stalled || log_after_ == 0 ? kNever : idle_since_ + log_after_;
  status_.set_waiting(wait, idle_since_);
  published_ = true;
  if (stalled) log_stall(wait, control);
}

void StallMonitor::log_stall(const Wait& wait, const ControlPlane& control) {
  const LoggedStall now{wait.activity, wait.number,
                        wait.activity == Activity::kCall ? kNoPeer : wait.peer};
  if (now == last_logged_ || wait.peer == kNoPeer)
    return;  // a recv from any rank may wait for long
  last_logged_ = now;
  const bool call = wait.activity == Activity::kCall;
  const PositionLookup lookup{*this, control, ranks_on_this_host()};
  const Rank end = lookup.end_of_chain(wait.peer);
  std::string line = name_of(rank_) + ": " + wait.spec + (call ? ", call " : ", message ") +
                     std::to_string(wait.number) + ", has not moved for " +
                     whole_seconds(stall_seconds_) + ": " + reason(wait) + "; " +
                     lookup.describe(wait.peer);
  if (end != wait.peer) line += "; at the end of the chain, " + lookup.describe(end);
  log_(line + ". All ranks of a host: gradwire doctor --job");
}

}  // namespace gradwire::exec
