// simulate(): processes the frames of all ranks event by event, in the order of time.
#include <algorithm>
#include <cmath>
#include <queue>
#include <tuple>

#include "gradwire/base/error.h"
#include "gradwire/base/spin.h"
#include "gradwire/schedule/cost.h"
#include "gradwire/schedule/frames.h"
#include "gradwire/schedule/simulated_links.h"

namespace gradwire::schedule {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::size_t kNone = ~std::size_t{0};

// Where ranks share cores, or NICs let bursts pass, successive calls are simulated. The first and
// the last do not count, as no call precedes or follows them.
constexpr int kCallsThatCount = 2;

// The cores of hosts on which several ranks share one, and the time from which each is free.
class Cores {
 public:
  Cores(const CostModel& model, const std::vector<int>& host_of, int ranks)
      : host_of_(host_of.empty() ? std::vector<int>(at(ranks), 0) : host_of), turn_(model.turn) {
    const int hosts = 1 + *std::max_element(host_of_.begin(), host_of_.end());
    place_ranks(hosts, model.cores, model.sharing, model.call);
  }

  bool crowded(Rank rank) const { return seats_[at(rank)].core != kNone; }
  bool any_crowded() const { return !cores_.empty(); }

  // Returns when the rank, which has something to do from `time` on, gets its core if no other rank
  // takes it before: waiting ranks get it in turns.
  double turn_of(Rank rank, double time) const {
    const Seat& seat = seats_[at(rank)];
    const Core& core = cores_[seat.core];
    if (seat.promised == time && seat.left == core.left) return time;
    if (core.ranks == 1 || turn_ == 0) return std::max(time, core.free);
    const double cycle = core.ranks * turn_, waited = time - core.free;
    if (waited > kYields * cycle) return time + turn_;  // all ranks sleep
    const int ahead = 1 + (seat.place - core.last - 1 + core.ranks) % core.ranks;
    const double first = core.free + ahead * turn_;
    if (first >= time) return first;
    return first + std::ceil((time - first) / cycle - kSame) * cycle;
  }
  // Records the turn, so that rounding cannot change it later.
  void promise(Rank rank, double turn) {
    Seat& seat = seats_[at(rank)];
    seat.promised = turn;
    seat.left = cores_[seat.core].left;
  }
  // Frees the core on which the rank has worked until `time`.
  void leave_core(Rank rank, double time) {
    const Seat& seat = seats_[at(rank)];
    cores_[seat.core].free = time;
    ++cores_[seat.core].left;
    cores_[seat.core].last = seat.place;
  }

 private:
  struct Seat {
    std::size_t core = kNone;
    int place = 0;  // among the core's ranks
    double promised = -1;
    std::uint64_t left = 0;  // the core's `left` at that time
  };
  struct Core {
    double free = 0;
    int last = 0;  // the place of the rank that had it last
    int ranks = 0;
    std::uint64_t left = 0;  // how many times a rank has left it
  };
  static constexpr double kSame = 1e-6;  // of a cycle

  // Assigns ranks to cores on machines that have more ranks than cores.
  void place_ranks(int hosts, int cores, int sharing, double start) {
    seats_.resize(host_of_.size());
    for (int machine = 0; machine * sharing < hosts; ++machine) {
      auto here = [&](int host) { return host / sharing == machine; };
      if (std::count_if(host_of_.begin(), host_of_.end(), here) <= cores) continue;
      const std::size_t first = cores_.size();
      cores_.resize(first + at(cores));
      int next = 0;
      for (std::size_t r = 0; r < seats_.size(); ++r)
        if (here(host_of_[r])) sit_down(seats_[r], first + at(next++ % cores));
    }
    // The first rank of each core has it as soon as calls begin.
    for (Core& core : cores_) core = {start - turn_, core.ranks - 1, core.ranks, 0};
  }
  void sit_down(Seat& seat, std::size_t core) {
    seat.core = core;
    seat.place = cores_[core].ranks;
    ++cores_[core].ranks;
  }

  std::vector<int> host_of_;
  double turn_;
  std::vector<Seat> seats_;  // by rank
  std::vector<Core> cores_;  // of crowded hosts
};

// Returns the cut of a call of which chunks have only so many slices.
Cut share_of(const Cut& cut, int slices) {
  const std::int64_t segments = (std::int64_t{cut.segments} * slices + cut.slices - 1) / cut.slices;
  return {static_cast<int>(segments), slices};
}

class Simulation {
 public:
  Simulation(const Frames& frames, const CostModel& model, const Workload& work, int slices)
      : frames_(frames),
        model_(model),
        whole_slices_(work.cut().slices),
        cut_(share_of(work.cut(), slices)),
        cores_(model, work.host_of, frames.ranks()),
        links_(model, work, frames.ranks()),
        growth_(model.growth(total_bytes(work))),
        calls_(frames.mutual() && (cores_.any_crowded() || model.between.burst > 0)
                   ? kCallsThatCount + 2
                   : 1),
        segments_(cut_.segments * calls_),
        arrivals_(frames.messages().size() * at(segments_), kNever),
        last_bits_(links_.uneven() ? arrivals_.size() : 0, 0),
        ranks_(at(frames.ranks())),
        ends_(at(calls_), model.call) {
    const std::vector<WavefrontStep> order =
        wavefront(starts_of(frames.between_sites(), work.segments), cut_.segments);
    for (Rank rank = 0; rank < frames.ranks(); ++rank) list_steps(rank, order);
  }

  // Returns the seconds of one call.
  double run(double limit) {
    for (Rank r = 0; r < frames_.ranks(); ++r) events_.push({model_.call, r, kNone});
    const double most = calls_ == 1 ? limit : (calls_ + 1) * limit;
    while (!events_.empty()) {
      const SimulatedEvent event = events_.top();
      events_.pop();
      if (event.time > most) return kNever;
      if (event.flight == kNone)
        proceed(event.rank, event.time);
      else
        enter(event.flight, event.hop, event.time);
    }
    const double seconds =
        calls_ == 1 ? ends_[0]
                    : std::max(model_.call, (ends_[kCallsThatCount] - ends_[0]) / kCallsThatCount);
    return seconds > limit ? kNever : seconds;
  }

 private:
  // Either a rank can go on (flight is kNone), or the first bit of a message's segment arrives at
  // the link of a hop.
  struct SimulatedEvent {
    double time;
    Rank rank;
    std::size_t flight;
    int hop = 0;
    bool operator<(const SimulatedEvent& other) const {  // the queue's top is the greatest
      return std::tie(time, rank, flight, hop) >
             std::tie(other.time, other.rank, other.flight, other.hop);
    }
  };
  // One frame of a rank, in the order of all its frames in that direction.
  struct FrameStep {
    std::uint32_t item = 0;  // a send of the round, or a message
    int round = 0;
    int segment = 0;
    std::uint32_t needs = 0;  // of a send: receives that must have landed; of a receive: sends
    std::uint32_t place = 0;  // in the order of rounds and segments
  };
  struct RankState {
    std::vector<FrameStep> sends, receives;
    std::uint32_t sent = 0, landed = 0;
    bool landing_next = false;
    int calls = 0;               // that are finished
    std::uint32_t steps = 0;     // of the present call
    std::size_t awaits = kNone;  // the arrival that the rank sleeps for
    double asleep_since = 0;
    std::uint32_t begun = 0;  // places of the order at which the rank was, and has spent `round`
  };

  // Lists what a rank does, as exec/plan does: a send waits for what landed of its segment
  // in the rounds before, and a receive for the sends of its own round.
  void list_steps(Rank rank, const std::vector<WavefrontStep>& order) {
    RankState& state = ranks_[at(rank)];
    std::vector<std::uint32_t> landed(at(segments_), 0), staged(at(segments_), 0);
    auto add = [&](std::vector<FrameStep>& steps, std::vector<std::uint32_t>& done,
                   const FrameStep& step, std::uint32_t message) {
      if (in_segment(message, step.segment) == 0) return;
      steps.push_back(step);
      done[at(step.segment)] = static_cast<std::uint32_t>(steps.size());
    };
    std::uint32_t place = 0;
    for (int call = 0; call < calls_; ++call)
      for (const auto [round, segment] : order) {
        const int now = segment + call * cut_.segments;
        const auto sends = frames_.sends(round, rank);
        for (std::uint32_t i = 0; i < sends.size(); ++i)
          add(state.sends, staged, {i, round, now, landed[at(now)], place},
              frames_.copies(sends[i])[0]);
        for (std::uint32_t message : frames_.receives(round, rank))
          add(state.receives, landed, {message, round, now, staged[at(now)], place}, message);
        ++place;
      }
  }

  // Lets a rank work from `time`, and puts its next event into the queue.
  void proceed(Rank rank, double time) {
    if (cores_.crowded(rank)) return take_turn(rank, time);
    while (step(rank, time))
      if (!events_.empty() && SimulatedEvent{time, rank, kNone} < events_.top())
        return events_.push({time, rank, kNone});
    wait(rank, time);
  }

  void take_turn(Rank rank, double time) {
    if (!can_step(rank, time)) return wait(rank, time);
    const double turn = cores_.turn_of(rank, time);
    if (turn > time) {
      cores_.promise(rank, turn);
      return events_.push({turn, rank, kNone});
    }
    while (step(rank, time)) continue;
    cores_.leave_core(rank, time);
    wait(rank, time);
  }

  bool can_step(Rank rank, double time) {
    return next_send(rank) != nullptr || (next_receive(rank) != nullptr && arrival(rank) <= time);
  }

  // Does one send or one landing, alternately where both are possible. Returns false when neither
  // is.
  bool step(Rank rank, double& time) {
    RankState& state = ranks_[at(rank)];
    const FrameStep* send = next_send(rank);
    const FrameStep* receive = next_receive(rank);
    const bool lands = receive != nullptr && arrival(rank) <= time;
    if (send == nullptr && !lands) return false;
    if (lands && (send == nullptr || state.landing_next))
      land(rank, *receive, time);
    else
      stage(rank, *send, time);
    if (++state.steps == steps_of_call(rank)) end_call(rank, time);
    return true;
  }

  std::uint32_t steps_of_call(Rank rank) const {
    const RankState& state = ranks_[at(rank)];
    return static_cast<std::uint32_t>(state.sends.size() + state.receives.size()) /
           static_cast<std::uint32_t>(calls_);
  }

  // Ends a call of the rank; its next call begins at once.
  void end_call(Rank rank, double& time) {
    RankState& state = ranks_[at(rank)];
    ends_[at(state.calls)] = std::max(ends_[at(state.calls)], time);
    state.steps = 0;
    if (++state.calls < calls_) time += model_.call;
  }

  void begin_round(RankState& state, std::uint32_t place, double slowness, double& time) const {
    if (place < state.begun) return;
    state.begun = place + 1;
    time += slowness * model_.round;
  }

  void stage(Rank rank, const FrameStep& step, double& time) {
    RankState& state = ranks_[at(rank)];
    const Frames::Send& send = frames_.sends(step.round, rank)[step.item];
    const double slowness = links_.slowness(rank);
    begin_round(state, step.place, slowness, time);
    time +=
        slowness * (send.work.seconds(growth_) / parts_of(frames_.copies(send)[0], step.segment));
    for (std::uint32_t m : frames_.copies(send)) {
      const LinkCost& link = links_.cost(rank, frames_.messages()[m].dst);
      time += slowness * (link.alpha + link.copy * bytes_of(m, step.segment));
      enter(m * at(segments_) + at(step.segment), 0, time);
    }
    ++state.sent;
    state.landing_next = true;
  }

  // Lets the first bit of a flight enter the link of a hop.
  void enter(std::size_t flight, int hop, double time) {
    const Frames::RoundMessage& message = frames_.messages()[flight / at(segments_)];
    const auto [src, dst] = std::pair(message.src, message.dst);
    double unused = 0;
    double& last_bit = last_bits_.empty() ? unused : last_bits_[flight];
    const double bytes = bytes_of(static_cast<std::uint32_t>(flight / at(segments_)),
                                  static_cast<int>(flight % at(segments_)));
    const double next = links_.pass(src, dst, hop, bytes, time, last_bit);
    if (hop + 1 < links_.hops(src, dst) && links_.cost(src, dst).beta > 0)
      events_.push({next, dst, flight, hop + 1});
    else
      arrive(flight, next);
  }

  void arrive(std::size_t flight, double time) {
    arrivals_[flight] = time;
    const Rank dst = frames_.messages()[flight / at(segments_)].dst;
    RankState& state = ranks_[at(dst)];
    if (state.awaits != flight) return;
    state.awaits = kNone;
    events_.push({std::max(time, state.asleep_since), dst, kNone});
  }

  void land(Rank rank, const FrameStep& step, double& time) {
    RankState& state = ranks_[at(rank)];
    const Frames::RoundMessage& message = frames_.messages()[step.item];
    const LinkCost& link = links_.cost(message.src, rank);
    const double slowness = links_.slowness(rank);
    begin_round(state, step.place, slowness, time);
    time += slowness * (link.alpha + link.copy * bytes_of(step.item, step.segment) +
                        message.work.seconds(growth_) / parts_of(step.item, step.segment));
    ++state.landed;
    state.landing_next = false;
  }

  // Lets the rank wait until its next message arrives; nothing can be done before that.
  void wait(Rank rank, double time) {
    RankState& state = ranks_[at(rank)];
    if (next_receive(rank) == nullptr) return;  // all done
    if (const double when = arrival(rank); when != kNever) {
      events_.push({std::max(when, time), rank, kNone});
    } else {
      state.awaits = arrival_index(rank);
      state.asleep_since = time;
    }
  }

  // Returns the rank's next send if what its segment needs has landed, else null.
  const FrameStep* next_send(Rank rank) const {
    const RankState& state = ranks_[at(rank)];
    return ready(state, state.sends, state.sent, state.landed);
  }
  // Returns the rank's next receive if the rank's own sends of that round are staged, else null.
  const FrameStep* next_receive(Rank rank) const {
    const RankState& state = ranks_[at(rank)];
    return ready(state, state.receives, state.landed, state.sent);
  }
  const FrameStep* ready(const RankState& state, const std::vector<FrameStep>& steps,
                         std::uint32_t done, std::uint32_t done_of_other) const {
    if (done == steps.size()) return nullptr;
    const FrameStep& next = steps[done];
    const bool now = next.segment < (state.calls + 1) * cut_.segments;
    return now && done_of_other >= next.needs ? &next : nullptr;
  }

  std::size_t arrival_index(Rank rank) const {
    const RankState& state = ranks_[at(rank)];
    const FrameStep& step = state.receives[state.landed];
    return step.item * at(segments_) + at(step.segment);
  }
  double arrival(Rank rank) const { return arrivals_[arrival_index(rank)]; }

  int in_segment(std::uint32_t message, int segment) const {
    const Frames::RoundMessage& its = frames_.messages()[message];
    return cut_.slices_in(its.first_chunk, its.chunks, segment % cut_.segments);
  }
  // Returns how many such frames the message would have.
  double parts_of(std::uint32_t message, int segment) const {
    const double slices = whole_slices_ * frames_.messages()[message].chunks;
    return slices / in_segment(message, segment);
  }
  double bytes_of(std::uint32_t message, int segment) const {
    return frames_.messages()[message].wire / parts_of(message, segment) + kHeaderBytes;
  }

  const Frames& frames_;
  const CostModel& model_;
  const double whole_slices_;  // of each chunk
  const Cut cut_;              // of what is simulated of each call
  Cores cores_;
  SimulatedLinks links_;
  const double growth_;
  const int calls_, segments_;     // in all
  std::vector<double> arrivals_;   // by message and segment
  std::vector<double> last_bits_;  // the same, where links are uneven: when the last link is passed
  std::vector<RankState> ranks_;
  std::vector<double> ends_;  // by call
  std::priority_queue<SimulatedEvent> events_;
};

}  // namespace

double simulate(const Frames& frames, const CostModel& model, const Workload& work, int slices,
                double limit) {
  return Simulation(frames, model, work, slices).run(limit);
}

double simulate(const Schedule& schedule, const CostModel& model, const Workload& work,
                double limit) {
  const auto ranks = at(schedule.ranks);
  if (work.chunks.size() != at(schedule.chunks) || work.segments < 1 ||
      (!work.host_of.empty() && work.host_of.size() != ranks))
    throw InvalidArgument("simulate: the workload is not one of schedule '" + schedule.name + "'");
  const Frames frames(schedule, model, work);
  return simulate(frames, model, work, work.cut().slices, limit);
}

}  // namespace gradwire::schedule
