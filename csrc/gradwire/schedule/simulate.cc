// simulate(): the frames of all ranks, event by event in the order of time.
#include <algorithm>
#include <cmath>
#include <queue>
#include <tuple>
#include <type_traits>

#include "gradwire/base/error.h"
#include "gradwire/schedule/cost.h"
#include "gradwire/schedule/frames.h"

namespace gradwire::schedule {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::size_t kNone = ~std::size_t{0};

std::size_t at(int i) { return static_cast<std::size_t>(i); }

// Cards and cores, and since when each is free.
class Hosts {
 public:
  Hosts(const CostModel& model, const std::vector<int>& host_of, int ranks)
      : host_of_(host_of.empty() ? std::vector<int>(at(ranks), 0) : host_of),
        cores_(model.cores),
        turn_(model.turn) {
    const int hosts = 1 + *std::max_element(host_of_.begin(), host_of_.end());
    std::vector<int> population(at(hosts), 0);
    for (int host : host_of_) ++population[at(host)];
    for (int p : population) crowded_.push_back(p > cores_);
    const bool any = std::find(crowded_.begin(), crowded_.end(), true) != crowded_.end();
    if (any) core_.assign(at(hosts) * at(cores_), {});
    for (auto* cards : {&out_of_rank_, &into_rank_}) cards->assign(at(ranks), 0);
    for (auto* cards : {&out_of_host_, &into_host_}) cards->assign(at(hosts), 0);
  }

  bool together(Rank a, Rank b) const { return host_of_[at(a)] == host_of_[at(b)]; }
  bool crowded(Rank rank) const { return crowded_[at(host_of_[at(rank)])]; }

  // When the first bit reaches the receiver's card, of bits that are ready to go at `time`.
  double send(const LinkCost& link, Rank src, Rank dst, double bytes, double time) {
    double& out = together(src, dst) ? out_of_rank_[at(src)] : out_of_host_[at(host_of_[at(src)])];
    const double start = std::max(time, out);
    out = start + bytes * link.beta;
    return start + link.latency;
  }
  // When all are there. To be called in the order of the first bits.
  double receive(const LinkCost& link, Rank src, Rank dst, double bytes, double first_bit) {
    double& in = together(src, dst) ? into_rank_[at(dst)] : into_host_[at(host_of_[at(dst)])];
    in = std::max(in, first_bit) + bytes * link.beta;
    return in;
  }

  struct Core {
    double free = 0;
    Rank last = -1;
  };
  // The rank's own where it is free, else the first that is.
  Core& take_core(Rank rank, double& time) {
    const std::size_t first = at(host_of_[at(rank)]) * at(cores_);
    Core* best = &core_[first];
    for (std::size_t c = first; c < first + at(cores_); ++c) {
      if (core_[c].last == rank && core_[c].free <= time) return core_[c];
      if (core_[c].free < best->free) best = &core_[c];
    }
    const bool first_use = best->last < 0 || best->last == rank;
    time = std::max(time, best->free) + (first_use ? 0 : turn_);
    best->last = rank;
    return *best;
  }

 private:
  std::vector<int> host_of_;
  int cores_;
  double turn_;
  std::vector<bool> crowded_;
  std::vector<Core> core_;
  std::vector<double> out_of_rank_, into_rank_, out_of_host_, into_host_;
};

class Simulation {
 public:
  Simulation(const Frames& frames, const CostModel& model, const Workload& work, int simulated)
      : frames_(frames),
        model_(model),
        segments_(simulated),
        parts_(work.segments),
        hosts_(model, work.host_of, frames.ranks()),
        growth_(model.growth(total_bytes(work))),
        order_(wavefront(frames.rounds(), simulated)),
        arrivals_(frames.messages().size() * at(simulated), kNever),
        ranks_(at(frames.ranks())) {
    for (RankState& rank : ranks_)
      for (auto* counts : {&rank.sent, &rank.landed}) counts->assign(at(segments_), 0);
  }

  double run(double limit) {
    for (Rank r = 0; r < frames_.ranks(); ++r) events_.push({0, r, kNone});
    double end = 0;
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      if (event.time + model_.call > limit) return kNever;
      if (event.flight == kNone)
        end = std::max(end, proceed(event.rank, event.time));
      else
        receive(event.flight, event.time);
    }
    return model_.call + end;
  }

 private:
  // A rank can go on, or the first bit of a segment of a message is there.
  struct Event {
    double time;
    Rank rank;
    std::size_t flight;
    bool operator<(const Event& other) const {  // the queue's top is the greatest
      return std::tie(time, rank, flight) > std::tie(other.time, other.rank, other.flight);
    }
  };
  // The next frame in one direction: place in the order, and among those of its round.
  struct Cursor {
    std::size_t place = 0;
    std::size_t within = 0;
  };
  struct RankState {
    Cursor send, receive;
    std::vector<std::uint32_t> sent, landed;  // by segment
    bool landing_next = false;
    std::size_t awaits = kNone;  // the arrival for which it sleeps
    double asleep_since = 0;
  };

  // Lets a rank work from `time`; returns when it stopped, with its next event in the queue.
  double proceed(Rank rank, double time) {
    if (!hosts_.crowded(rank)) {
      while (step(rank, time))
        if (!events_.empty() && Event{time, rank, kNone} < events_.top()) {
          events_.push({time, rank, kNone});
          return time;
        }
      wait(rank, time);
      return time;
    }
    if (!can_step(rank, time)) {
      wait(rank, time);
      return time;
    }
    Hosts::Core& core = hosts_.take_core(rank, time);
    while (step(rank, time)) {
    }
    core.free = time;
    wait(rank, time);
    return time;
  }

  bool can_step(Rank rank, double time) {
    return next_send(rank) != nullptr || (next_receive(rank) != nullptr && arrival(rank) <= time);
  }

  // One send or one landing, by turns where both are possible; false when neither is.
  bool step(Rank rank, double& time) {
    RankState& state = ranks_[at(rank)];
    const Frames::Send* send = next_send(rank);
    const Frames::Message* receive = next_receive(rank);
    const bool lands = receive != nullptr && arrival(rank) <= time;
    if (send == nullptr && !lands) return false;
    if (lands && (send == nullptr || state.landing_next))
      land(rank, *receive, time);
    else
      stage(rank, *send, time);
    return true;
  }

  void stage(Rank rank, const Frames::Send& send, double& time) {
    RankState& state = ranks_[at(rank)];
    const int segment = order_[state.send.place].segment;
    time += send.work * growth_ / parts_;
    for (std::uint32_t m : frames_.copies(send)) {
      const Frames::Message& message = frames_.messages()[m];
      const LinkCost& link = link_of(message);
      const double bytes = bytes_of(message);
      time += link.alpha + link.copy * growth_ * bytes;
      const std::size_t flight = m * at(segments_) + at(segment);
      const double first_bit = hosts_.send(link, rank, message.dst, bytes, time);
      if (link.beta > 0)
        events_.push({first_bit, message.dst, flight});
      else
        arrive(flight, first_bit);
    }
    ++state.sent[at(segment)];
    ++state.send.within;
    state.landing_next = true;
  }

  void receive(std::size_t flight, double first_bit) {
    const Frames::Message& message = frames_.messages()[flight / at(segments_)];
    arrive(flight, hosts_.receive(link_of(message), message.src, message.dst, bytes_of(message),
                                  first_bit));
  }

  void arrive(std::size_t flight, double time) {
    arrivals_[flight] = time;
    const Rank dst = frames_.messages()[flight / at(segments_)].dst;
    RankState& state = ranks_[at(dst)];
    if (state.awaits != flight) return;
    state.awaits = kNone;
    events_.push({std::max(time, state.asleep_since), dst, kNone});
  }

  void land(Rank rank, const Frames::Message& message, double& time) {
    RankState& state = ranks_[at(rank)];
    const LinkCost& link = link_of(message);
    time += link.alpha + (link.copy * bytes_of(message) + message.work / parts_) * growth_;
    ++state.landed[at(order_[state.receive.place].segment)];
    ++state.receive.within;
    state.landing_next = false;
  }

  // Where nothing can be done now: until the next message is there.
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

  // The rank's next send, where it may go: what its own segment needs has landed.
  const Frames::Send* next_send(Rank rank) {
    RankState& state = ranks_[at(rank)];
    const auto sends = seek(state.send, [&](int round) { return frames_.sends(round, rank); });
    if (sends.empty()) return nullptr;
    const Place place = order_[state.send.place];
    const bool ready =
        state.landed[at(place.segment)] >= frames_.received_before(place.round, rank);
    return ready ? &sends[state.send.within] : nullptr;
  }

  // The rank's next receive, where it may land: its own sends of that round are staged.
  const Frames::Message* next_receive(Rank rank) {
    RankState& state = ranks_[at(rank)];
    const auto receives =
        seek(state.receive, [&](int round) { return frames_.receives(round, rank); });
    if (receives.empty()) return nullptr;
    const Place place = order_[state.receive.place];
    const bool ready = state.sent[at(place.segment)] >= frames_.sent_before(place.round + 1, rank);
    return ready ? &frames_.messages()[receives[state.receive.within]] : nullptr;
  }

  // What there is at the cursor, which moves past places where there is nothing.
  template <typename Of>
  std::invoke_result_t<Of, int> seek(Cursor& cursor, Of of) const {
    for (; cursor.place < order_.size(); ++cursor.place, cursor.within = 0) {
      const auto found = of(order_[cursor.place].round);
      if (cursor.within < found.size()) return found;
    }
    return {};
  }

  std::size_t arrival_index(Rank rank) const {
    const Cursor& cursor = ranks_[at(rank)].receive;
    const Place place = order_[cursor.place];
    return frames_.receives(place.round, rank)[cursor.within] * at(segments_) + at(place.segment);
  }
  double arrival(Rank rank) const { return arrivals_[arrival_index(rank)]; }

  double bytes_of(const Frames::Message& message) const {
    return message.wire / parts_ + kHeaderBytes;
  }
  const LinkCost& link_of(const Frames::Message& message) const {
    return hosts_.together(message.src, message.dst) ? model_.within : model_.between;
  }

  const Frames& frames_;
  const CostModel& model_;
  const int segments_;  // that are simulated
  const int parts_;     // into which a message is cut
  Hosts hosts_;
  const double growth_;
  const std::vector<Place> order_;
  std::vector<double> arrivals_;  // by message and segment
  std::vector<RankState> ranks_;
  std::priority_queue<Event> events_;
};

}  // namespace

double simulate(const Frames& frames, const CostModel& model, const Workload& work, int simulated,
                double limit) {
  return Simulation(frames, model, work, simulated).run(limit);
}

double simulate(const Schedule& schedule, const CostModel& model, const Workload& work,
                double limit) {
  const auto ranks = at(schedule.ranks);
  if (work.chunks.size() != at(schedule.chunks) || work.segments < 1 ||
      (!work.host_of.empty() && work.host_of.size() != ranks))
    throw InvalidArgument("simulate: the workload is not one of schedule '" + schedule.name + "'");
  const Frames frames(schedule, model, work);
  return simulate(frames, model, work, work.segments, limit);
}

}  // namespace gradwire::schedule
