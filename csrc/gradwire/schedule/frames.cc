#include "gradwire/schedule/frames.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "gradwire/schedule/simulated_links.h"

namespace gradwire::schedule {
namespace {

constexpr std::uint32_t kNone = ~0U;
// A chunk that a rank touched in this round or so many rounds before it is still in a cache. More
// rounds predict the measured calls of bench/results/model-2026-11-22.json worse.
constexpr int kNearRounds = 1;
constexpr int kNever = -1000;

}  // namespace

Cut cut_into(int segments, double chunk, double message) {
  const double least = std::min(kSmallestSlice, message / (2.0 * segments));
  const double slices = least > 0 ? std::floor(chunk / least) : 1;
  return {segments, static_cast<int>(std::clamp<double>(slices, 1, segments))};
}

std::vector<bool> rounds_between_sites(const Schedule& schedule, const std::vector<int>& site_of) {
  std::vector<bool> found;
  for (const Round& round : schedule.rounds)
    found.push_back(!site_of.empty() && std::ranges::any_of(round, [&](const Edge& edge) {
      return site_of[at(edge.src)] != site_of[at(edge.dst)];
    }));
  return found;
}

std::vector<int> starts_of(const std::vector<bool>& between_sites, int segments) {
  const int far = std::clamp(segments / 2, kLag, kLagBetweenSites);
  std::vector<int> starts;
  for (std::size_t r = 0; r < between_sites.size(); ++r) {
    const bool waits = between_sites[r] || (r > 0 && between_sites[r - 1]);
    starts.push_back(r == 0 ? 0 : starts.back() + (waits ? far : kLag));
  }
  return starts;
}

std::vector<WavefrontStep> wavefront(const std::vector<int>& starts, int segments) {
  std::vector<WavefrontStep> order;
  order.reserve(starts.size() * at(segments));
  const int ticks = starts.empty() ? 0 : segments + starts.back();
  for (int tick = 0; tick < ticks; ++tick) {
    auto next = std::ranges::upper_bound(starts, tick);  // the last rounds have the first segments
    for (; next != starts.begin() && tick - *std::prev(next) < segments; --next)
      order.push_back({static_cast<int>(next - starts.begin()) - 1, tick - *std::prev(next)});
  }
  return order;
}

class Frames::FramesBuilder {
 public:
  FramesBuilder(Frames& frames, const Schedule& schedule, const CostModel& model,
                const Workload& work)
      : out_(frames),
        schedule_(schedule),
        model_(model),
        work_(work),
        message_to_(at(schedule.ranks), kNone),
        group_at_(at(schedule.chunks), kNone) {
    touched_.assign(at(schedule.ranks) * at(schedule.chunks), kNever);
    if (work.codec) finished_.assign(at(schedule.ranks) * at(schedule.chunks), 0);
  }

  void make() {
    for (const Round& round : schedule_.rounds) {
      sort_by_source(round);
      message_of_.assign(round.size(), kNone);
      const auto first = static_cast<std::uint32_t>(out_.messages_.size());
      for (Rank src = 0; src < schedule_.ranks; ++src) {
        out_.sends_from_.push_back(static_cast<std::uint32_t>(out_.sends_.size()));
        make_messages(round, src);
        make_sends();
      }
      land_all(round);
      list_receives(round, first);
      ++round_;
      if (work_.codec) note_arrivals(round);
    }
    out_.sends_from_.push_back(static_cast<std::uint32_t>(out_.sends_.size()));
    out_.receives_from_.push_back(static_cast<std::uint32_t>(out_.receives_.size()));
  }

 private:
  // The properties of a message that RoundMessage lacks.
  struct Staged {
    Effort work;
    std::uint64_t bytes_digest = 0xcbf29ce484222325ULL;
  };

  std::span<const std::uint32_t> edges_from(Rank src) const {
    return {by_source_.data() + source_from_[at(src)],
            source_from_[at(src) + 1] - source_from_[at(src)]};
  }

  // Sorts the numbers of edges by source, and in list order for each source.
  void sort_by_source(const Round& round) {
    source_from_.assign(at(schedule_.ranks) + 1, 0);
    for (const Edge& edge : round) ++source_from_[at(edge.src) + 1];
    for (std::size_t i = 1; i < source_from_.size(); ++i) source_from_[i] += source_from_[i - 1];
    by_source_.resize(round.size());
    std::vector<std::uint32_t> next = source_from_;
    for (std::uint32_t e = 0; e < round.size(); ++e) by_source_[next[at(round[e].src)]++] = e;
  }

  void make_messages(const Round& round, Rank src) {
    first_message_ = out_.messages_.size();
    staged_.clear();
    for (std::uint32_t e : edges_from(src)) {
      const Edge& edge = round[e];
      std::uint32_t& to = message_to_[at(edge.dst)];
      if (to == kNone) {
        to = static_cast<std::uint32_t>(out_.messages_.size());
        out_.messages_.push_back({src, edge.dst, edge.chunks.first});
        staged_.push_back({});
      }
      message_of_[e] = to;
      add(edge, out_.messages_[to], staged_[to - first_message_]);
    }
    for (std::uint32_t e : edges_from(src)) message_to_[at(round[e].dst)] = kNone;
  }

  void add(const Edge& edge, RoundMessage& message, Staged& staged) {
    const bool copies = edge.landing == Landing::kCopy;
    const bool coded = codes(edge);
    message.chunks += edge.chunks.size();
    for (int c = edge.chunks.first; c < edge.chunks.last; ++c) {
      const double size = work_.chunks[at(c)];
      message.wire += coded ? size * work_.ratio : size;
      const double seconds = !coded   ? size * model_.move
                             : copies ? hand_on(edge.src, c)
                                      : size * work_.codec->encode;
      touch(edge.src, c, seconds, staged.work);
    }
    for (int word : {edge.chunks.first, edge.chunks.last, static_cast<int>(edge.landing),
                     static_cast<int>(coded)})
      staged.bytes_digest =
          (staged.bytes_digest ^ static_cast<std::uint64_t>(word)) * 0x100000001b3ULL;
  }

  // Adds the work of all landings of a round, which come after its sends.
  void land_all(const Round& round) {
    for (std::size_t e = 0; e < round.size(); ++e) {
      const Edge& edge = round[e];
      RoundMessage& message = out_.messages_[message_of_[e]];
      const double per_byte = codes(edge)                      ? work_.codec->decode
                              : edge.landing == Landing::kCopy ? model_.move
                                                               : model_.gamma;
      for (int c = edge.chunks.first; c < edge.chunks.last; ++c) {
        const double size = work_.chunks[at(c)];
        touch(edge.dst, c, size * per_byte, message.work);
      }
    }
  }

  // Books seconds of work on a chunk, as far or as near.
  void touch(Rank rank, int chunk, double seconds, Effort& effort) {
    int& last = touched_[at(rank) * at(schedule_.chunks) + at(chunk)];
    (round_ - last > kNearRounds ? effort.far : effort.near) += seconds;
    last = round_;
  }

  // Returns the seconds in which a rank stages a finished chunk. It travels verbatim: the first
  // rank to send it encodes it, and adopts what all ranks decode.
  bool codes(const Edge& edge) const {
    if (!work_.codec || !work_.between_sites) return work_.codec.has_value();
    return work_.site_of[at(edge.src)] != work_.site_of[at(edge.dst)];
  }

  double hand_on(Rank rank, int chunk) {
    const double size = work_.chunks[at(chunk)];
    char& finished = finished_[at(rank) * at(schedule_.chunks) + at(chunk)];
    const double encoded = finished ? 0 : size * (work_.codec->encode + work_.codec->decode);
    finished = 1;
    return encoded + size * work_.ratio * model_.move;
  }

  void note_arrivals(const Round& round) {
    for (const Edge& edge : round)
      if (edge.landing == Landing::kCopy)
        for (int c = edge.chunks.first; c < edge.chunks.last; ++c)
          finished_[at(edge.dst) * at(schedule_.chunks) + at(c)] = 1;
  }

  // Makes the sends of one rank and round. Messages that may be equal begin with the same chunk.
  void make_sends() {
    const std::size_t first_send = out_.sends_.size();
    group_of_.clear();
    std::vector<std::size_t> leaders;  // the first message of each send
    for (std::size_t i = 0; i < staged_.size(); ++i) {
      std::uint32_t& group = group_at_[first_chunk(i)];
      if (group == kNone || !same(leaders[group], i)) {
        group = static_cast<std::uint32_t>(leaders.size());
        leaders.push_back(i);
        out_.sends_.push_back({0, 0, staged_[i].work});
      }
      group_of_.push_back(group);
      ++out_.sends_[first_send + group].last;
    }
    auto end = static_cast<std::uint32_t>(out_.copies_.size());
    for (std::size_t s = first_send; s < out_.sends_.size(); ++s) {
      Send& send = out_.sends_[s];
      send.first = end;
      end += std::exchange(send.last, end);
    }
    out_.copies_.resize(end);
    for (std::size_t i = 0; i < staged_.size(); ++i) {
      Send& send = out_.sends_[first_send + group_of_[i]];
      out_.copies_[send.last++] = static_cast<std::uint32_t>(first_message_ + i);
      group_at_[first_chunk(i)] = kNone;
    }
  }

  std::size_t first_chunk(std::size_t message) const {
    return at(out_.messages_[first_message_ + message].first_chunk);
  }
  bool same(std::size_t a, std::size_t b) const {
    const RoundMessage& one = out_.messages_[first_message_ + a];
    const RoundMessage& other = out_.messages_[first_message_ + b];
    return staged_[a].bytes_digest == staged_[b].bytes_digest && near(one) == near(other);
  }
  bool near(const RoundMessage& message) const {
    return work_.host_of.empty() ||
           work_.host_of[at(message.src)] == work_.host_of[at(message.dst)];
  }

  // Lists receives by destination, each message at the position of its first edge.
  void list_receives(const Round& round, std::uint32_t first) {
    std::vector<std::uint32_t> from(at(schedule_.ranks) + 1, 0);
    for (std::size_t m = first; m < out_.messages_.size(); ++m)
      ++from[at(out_.messages_[m].dst) + 1];
    for (std::size_t i = 1; i < from.size(); ++i) from[i] += from[i - 1];
    const auto base = static_cast<std::uint32_t>(out_.receives_.size());
    for (Rank dst = 0; dst < schedule_.ranks; ++dst)
      out_.receives_from_.push_back(base + from[at(dst)]);
    out_.receives_.resize(out_.messages_.size());
    std::vector<bool> listed(out_.messages_.size() - first, false);
    for (std::size_t e = 0; e < round.size(); ++e) {
      const std::uint32_t message = message_of_[e];
      if (listed[message - first]) continue;
      listed[message - first] = true;
      out_.receives_[base + from[at(round[e].dst)]++] = message;
    }
  }

  Frames& out_;
  const Schedule& schedule_;
  const CostModel& model_;
  const Workload& work_;
  std::vector<int> touched_;  // by rank and chunk: the last round
  int round_ = 0;
  std::vector<char> finished_;  // by rank and chunk: it left this rank finished, or arrived so
  std::vector<std::uint32_t> source_from_, by_source_;
  std::vector<std::uint32_t> message_of_;  // by edge of the round
  std::vector<std::uint32_t> message_to_;  // by destination
  std::vector<std::uint32_t> group_at_;    // by first chunk
  std::vector<std::uint32_t> group_of_;
  std::vector<Staged> staged_;
  std::size_t first_message_ = 0;
};

Frames::Frames(const Schedule& schedule, const CostModel& model, const Workload& work)
    : ranks_(schedule.ranks),
      between_sites_(rounds_between_sites(schedule, work.site_of)),
      mutual_(schedule.collective == Collective::kAllReduce ||
              schedule.collective == Collective::kAllGather) {
  FramesBuilder(*this, schedule, model, work).make();
}

namespace {

// Seconds of work of processors, by rank and, where hosts share cores, by machine; and of links.
class BusyTimes {
 public:
  BusyTimes(const Frames& frames, const CostModel& model, const Workload& work)
      : work_(work), growth_(model.growth(total_bytes(work))), links_(model, work, frames.ranks()) {
    const auto p = at(frames.ranks());
    const int hosts =
        work.host_of.empty() ? 1 : 1 + *std::max_element(work.host_of.begin(), work.host_of.end());
    ranks_.assign(p, 0);
    hosts_.assign(at(hosts), 0);
    for (int round = 0; round < frames.rounds(); ++round)
      for (Rank rank = 0; rank < frames.ranks(); ++rank)
        for (const Frames::Send& send : frames.sends(round, rank))
          book(rank, send.work.seconds(growth_));
    for (const Frames::RoundMessage& message : frames.messages()) add(message);
    for (std::size_t r = 0; r < p; ++r)
      hosts_[host(static_cast<Rank>(r)) / at(model.sharing)] += ranks_[r];
    for (double& seconds : hosts_) seconds /= model.cores;
  }

  double most() const {
    double found = links_.most();
    for (const auto* all : {&ranks_, &hosts_})
      found = std::max(found, *std::max_element(all->begin(), all->end()));
    return found;
  }

 private:
  std::size_t host(Rank rank) const {
    return work_.host_of.empty() ? 0 : at(work_.host_of[at(rank)]);
  }

  void book(Rank rank, double seconds) { ranks_[at(rank)] += links_.slowness(rank) * seconds; }

  void add(const Frames::RoundMessage& message) {
    const LinkCost& link = links_.cost(message.src, message.dst);
    const int frames = work_.cut().frames_of(message.chunks);
    const double bytes = message.wire + frames * kHeaderBytes;
    const double processor = frames * link.alpha + link.copy * bytes;
    book(message.src, processor);
    book(message.dst, processor + message.work.seconds(growth_));
    links_.carry(message.src, message.dst, bytes);
  }

  const Workload& work_;
  const double growth_;
  SimulatedLinks links_;
  std::vector<double> ranks_, hosts_;
};

}  // namespace

double most_work(const Frames& frames, const CostModel& model, const Workload& work) {
  return BusyTimes(frames, model, work).most();
}

}  // namespace gradwire::schedule
