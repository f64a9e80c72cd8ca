// choose(): the fastest algorithm of the catalogue, with the best size of its segments. predict():
// the time of a schedule that the caller chose.
#include <algorithm>
#include <cmath>

#include "gradwire/schedule/cost.h"
#include "gradwire/schedule/frames.h"

namespace gradwire::schedule {
namespace {

// An alternative must take at most this share of the time: no model can tell smaller differences.
constexpr double kClearly = 0.99;
// Bytes. Between hosts each frame costs both ends system calls, which the model takes to be hidden
// behind the NIC; on a fast link they are not.
constexpr double kLeastSegment = 8 * 1024, kLeastSegmentBetweenHosts = 64 * 1024;
constexpr std::size_t kFewMessages = 4096;  // of a schedule for which segments are searched
// The most messages times segments of one simulation, of any schedule and of a tree. The time of
// further segments is extrapolated.
constexpr double kMostFrames = 8192, kMostFramesOfTree = 1 << 19;
// All inputs may go to all ranks, or to one, for arrays of at most so many bytes.
constexpr double kFewBytes = 16 * 1024;
constexpr int kMostGatherers = 16;

bool has_sites(const Question& question) { return question.sites.ranks.size() > 1; }

// Returns what hierarchical takes for its groups: sites where there are several, else hosts.
const std::vector<std::vector<Rank>>& groups_of(const Question& question) {
  return has_sites(question) ? question.sites.ranks : question.hosts;
}

std::vector<int> site_of(const Question& question) {
  if (!has_sites(question)) return {};
  return group_of(question.ranks, question.sites.ranks);
}

Network network_of(const Question& question) {
  Network network = question.network;
  const Sites& sites = question.sites;
  if (has_sites(question))
    network.levels.push_back({1, sites.beta, sites.latency, 1, site_of(question)});
  return network;
}

// Where ranks share cores, a star of few bytes needs the fewest switches between them. Of more
// bytes its root has most of the work, and takes up to twice the predicted time.
bool is_candidate(const Question& question, std::string_view name) {
  if (question.collective != Collective::kAllReduce) return true;
  if (name == "recursive_doubling") return !question.codec;
  const bool few = question.bytes <= kFewBytes && question.hosts.size() <= 1;
  return name != "star" || question.ranks == 2 || few;
}

std::vector<std::string> candidates(const Question& question) {
  std::vector<std::string> names;  // ties go to the first
  for (std::string_view name : algorithms(question.collective))
    if (is_candidate(question, name)) names.emplace_back(name);
  const std::size_t groups = groups_of(question).size();
  const bool nested = groups > 1 && groups < at(question.ranks);
  std::vector<const char*> outers = {"direct", "ring", "halving_doubling"};
  if (has_sites(question) && !question.codec) outers.push_back("recursive_doubling");
  if (question.between_sites && has_sites(question) && nested) names.clear();
  if (question.collective == Collective::kAllReduce && nested)
    for (const char* inner : {"direct", "binary_tree"})
      for (const char* outer : outers)
        names.push_back("hierarchical(" + std::string(inner) + "," + outer + ")");
  std::stable_partition(names.begin(), names.end(),
                        [](const std::string& name) { return name == "direct"; });
  return names;
}

Recipe recipe_of(const Question& question, const std::string& algorithm) {
  return {question.collective, algorithm, question.ranks, question.root, groups_of(question)};
}

// Returns a lower bound on the time of any schedule of this shape whose rounds wait for each other.
double least_seconds(const CostModel& model, const Question& question, const ScheduleShape& shape) {
  const bool one_host = question.hosts.size() <= 1;
  const bool apart = question.hosts.size() == at(question.ranks);
  auto of = [&](const LinkCost& link) {
    const double bytes = shape.max_sent * question.bytes * question.ratio;
    return shape.rounds * (2 * link.alpha + link.latency + model.round) +
           bytes * std::max(link.beta, link.copy);
  };
  if (one_host) return of(model.within);
  return apart ? of(model.between) : std::min(of(model.within), of(model.between));
}

// One schedule, and the search for its best number of segments.
class Trial {
 public:
  Trial(const CostModel& model, const Question& question, const Schedule& schedule)
      : model_(model),
        work_{std::vector<double>(at(schedule.chunks), question.bytes / schedule.chunks),
              1,
              group_of(question.ranks, question.hosts),
              question.codec,
              question.ratio,
              network_of(question),
              0,
              site_of(question),
              question.between_sites && has_sites(question)},
        frames_(schedule, model, work_),
        most_message_(question.most_message),
        smallest_segment_(question.hosts.size() > 1 ? kLeastSegmentBetweenHosts : kLeastSegment) {
    for (const Frames::RoundMessage& message : frames_.messages())
      largest_ = std::max(largest_, message.wire);
    if (!std::isinf(most_message_))
      least_segments_ = std::max(1.0, std::ceil(largest_ / (most_message_ - kHeaderBytes)));
  }

  double unchosen() {
    alone_ = true;
    if (std::isinf(most_message_)) return seconds_of(1, std::numeric_limits<double>::infinity());
    const double most = most_message_ - kHeaderBytes;
    const double wanted = std::floor(largest_ / static_cast<double>(kSegmentsWanted));
    const double target = std::min(std::max(wanted, static_cast<double>(kSmallestSegment)), most);
    return seconds_of(std::max(1, static_cast<int>(std::ceil(largest_ / target))),
                      std::numeric_limits<double>::infinity());
  }

  // Doubles the number of segments as long as that makes the schedule faster.
  Choice best(double limit) {
    Choice found{{}, 0, limit};
    const bool searched = frames_.messages().size() <= kFewMessages;
    for (double segments = least_segments_;; segments *= 2) {
      const double seconds = seconds_of(static_cast<int>(segments), found.seconds);
      if (seconds >= found.seconds && segments > least_segments_) break;
      if (seconds < found.seconds)
        found = {{}, static_cast<std::size_t>(std::ceil(largest_ / segments)), seconds};
      if (!searched || largest_ / segments < 2 * smallest_segment_) break;
    }
    return found;
  }

 private:
  double seconds_of(int segments, double limit) {
    work_.segments = segments;
    const double chunk = work_.chunks[0];
    const int slices = work_.slices = cut_into(segments, chunk * work_.ratio, largest_).slices;
    const double busy = most_work(frames_, model_, work_);
    if (busy >= limit) return busy;
    const int some = slices_to_simulate();
    if (slices <= some)  // bursts end in a series of calls: no NIC is faster than its rate
      return std::max(busy, simulate(frames_, model_, work_, slices, limit));
    const double half = simulate(frames_, model_, work_, some / 2);
    const double more = simulate(frames_, model_, work_, some);
    const double each = std::max((more - half) / (some - some / 2), busy / slices);
    return more + each * (slices - some);
  }

  // Trees have few messages, and go at their pace only when the first segment has come back down:
  // where they are not compared with others, more segments of them are simulated. So they are where
  // many segments are on their way to other sites at once.
  int slices_to_simulate() const {
    const double messages = std::max<double>(1, static_cast<double>(frames_.messages().size()));
    const double most = work_.site_of.empty() ? 16 : 64;
    const bool more = alone_ && messages <= 4 * frames_.ranks();
    const double segments = more ? std::clamp(kMostFramesOfTree / messages, 2.0, 64.0)
                                 : std::clamp(kMostFrames / messages, 2.0, most);
    return std::max(2, static_cast<int>(segments) * work_.slices / work_.segments);
  }

  const CostModel& model_;
  Workload work_;
  Frames frames_;
  double most_message_, smallest_segment_;
  double largest_ = 0;  // bytes of the largest message
  double least_segments_ = 1;
  bool alone_ = false;  // not one of many that are compared
};

// Returns the all_gather that brings all inputs to all ranks, each of which then adds them up.
Question inputs_of(const Question& question) {
  Question inputs = question;
  inputs.collective = Collective::kAllGather;
  inputs.bytes = question.bytes * question.ranks;
  return inputs;
}

// Returns the ranks of the fullest machine, on which `sharing` neighbouring hosts are.
std::size_t most_on_machine(const CostModel& model, const Question& question) {
  if (question.hosts.empty()) return at(question.ranks);
  const auto sharing = at(model.sharing);
  std::size_t most = 1, here = 0;
  for (std::size_t h = 0; h < question.hosts.size(); ++h) {
    here = (h % sharing == 0 ? 0 : here) + question.hosts[h].size();
    most = std::max(most, here);
  }
  return most;
}

// Returns the seconds in which all ranks add up the inputs. Ranks that share cores take turns.
double adding_up(const CostModel& model, const Question& question) {
  const double in_turn =
      std::max(1.0, static_cast<double>(most_on_machine(model, question)) / model.cores);
  const double of_byte = 2 * model.move + (question.ranks - 1) * model.gamma;
  return question.bytes * of_byte * in_turn * model.growth(question.bytes * question.ranks);
}

Choice best_of_catalogue(const CostModel& model, const Question& question) {
  struct Candidate {
    double least;
    std::string name;
  };
  std::vector<Candidate> all;
  for (const std::string& name : candidates(question)) {
    const auto shape = closed_form(recipe_of(question, name));
    all.push_back({shape ? least_seconds(model, question, *shape) : 0, name});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.least < b.least; });
  Choice best{all[0].name, 0, std::numeric_limits<double>::infinity()};
  if (question.ranks == 1) return best;
  for (const Candidate& each : all) {
    if (each.least >= best.seconds) continue;
    Trial trial(model, question, generate(recipe_of(question, each.name)));
    Choice found = trial.best(best.seconds);
    if (found.seconds >= kClearly * best.seconds) continue;
    best = found;
    best.algorithm = each.name;
  }
  return best;
}

bool may_gather(const Question& question) {
  return question.collective == Collective::kAllReduce && !question.codec && question.ranks > 2 &&
         question.ranks <= kMostGatherers && question.bytes <= kFewBytes;
}

Choice best_gathered(const CostModel& model, const Question& question) {
  Choice choice = best_of_catalogue(model, inputs_of(question));
  choice.algorithm = "gather(" + choice.algorithm + ")";
  choice.seconds += adding_up(model, question);
  return choice;
}

}  // namespace

std::vector<int> group_of(int ranks, const std::vector<std::vector<Rank>>& groups) {
  std::vector<int> found(at(ranks), 0);
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (Rank rank : groups[g]) found[at(rank)] = static_cast<int>(g);
  return found;
}

double predict(const CostModel& model, const Schedule& schedule, const Question& question) {
  return Trial(model, question, schedule).unchosen();
}

double predict_gathered(const CostModel& model, const Schedule& all_gather,
                        const Question& question) {
  return predict(model, all_gather, inputs_of(question)) + adding_up(model, question);
}

Choice choose(const CostModel& model, const Question& question) {
  Choice best = best_of_catalogue(model, question);
  if (!may_gather(question)) return best;
  Choice other = best_gathered(model, question);
  return other.seconds < kClearly * best.seconds ? other : best;
}

}  // namespace gradwire::schedule
