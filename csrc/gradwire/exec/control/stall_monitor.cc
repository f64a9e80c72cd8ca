#include "gradwire/exec/control/stall_monitor.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace gradwire::exec {
namespace {

// A rank that has not moved for so long publishes whom it waits for.
constexpr double kPublishSeconds = 1;
constexpr std::uint64_t kNever = ~std::uint64_t{0};

std::uint64_t nanoseconds(double seconds) { return static_cast<std::uint64_t>(seconds * 1e9); }

// Returns "it waits for rank 1 to send segment 0 of round 3".
std::string reason(const Wait& wait) {
  std::string text = "it waits for " + name_of(wait.peer) + (wait.reads ? " to read" : " to send");
  if (wait.activity != Activity::kCall) return text;
  return text + " segment " + std::to_string(wait.segment) + " of round " +
         std::to_string(wait.round);
}

}  // namespace

// Looks up what a rank does: in its status page if it is on this host, else in its last frame.
struct StallMonitor::PositionLookup {
  const StallMonitor& self;
  const ControlPlane& control;
  std::vector<RankStatus> here;

  const RankStatus* find(Rank rank) const {
    const auto found = std::ranges::find_if(
        here, [&](const RankStatus& each) { return self.is_status_of(each, rank); });
    return found == here.end() ? nullptr : &*found;
  }

  std::string describe(Rank rank) const {
    const RankStatus* seen = find(rank);
    return seen ? exec::describe(*seen) : control.text_of_position(rank);
  }

  // Returns whom a rank waits for. A stopped rank waits for nobody, whatever its page shows.
  Rank next(Rank rank) const {
    if (const RankStatus* seen = find(rank)) return seen->stopped() ? kNoPeer : seen->page.peer();
    return control.last_position_of(rank).frame.culprit;
  }

  Rank end_of_chain(Rank rank) const {
    for (int step = 0; step < self.identity_.size; ++step) {
      const Rank waits_for = next(rank);
      if (waits_for == kNoPeer || waits_for == self.identity_.rank) break;
      rank = waits_for;
    }
    return rank;
  }
};

StallMonitor::StallMonitor(const Identity& identity, double stall_seconds, Log log)
    : identity_(identity),
      stall_seconds_(stall_seconds),
      log_(std::move(log)),
      status_(identity),
      publish_after_(nanoseconds(stall_seconds > 0 ? std::min(kPublishSeconds, stall_seconds)
                                                   : kPublishSeconds)),
      log_after_(nanoseconds(stall_seconds)) {}

bool StallMonitor::is_status_of(const RankStatus& found, Rank rank) const {
  const bool same_job =
      identity_.tag != 0 ? found.page.tag == identity_.tag : found.pid == ::getpid();
  return same_job && found.page.communicator == identity_.communicator && found.page.rank == rank;
}

std::optional<RankStatus> StallMonitor::status_on_this_host(Rank rank) const {
  for (const RankStatus& each : ranks_on_this_host())
    if (is_status_of(each, rank)) return each;
  return std::nullopt;
}

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
  std::string line = name_of(identity_.rank) + ": " + wait.spec +
                     (call ? ", call " : ", message ") + std::to_string(wait.number) +
                     ", has not moved for " + seconds_text(stall_seconds_) + ": " + reason(wait) +
                     "; " + lookup.describe(wait.peer);
  if (end != wait.peer) line += "; at the end of the chain, " + lookup.describe(end);
  log_(line + ". All ranks of a host: gradwire doctor --job");
}

}  // namespace gradwire::exec
