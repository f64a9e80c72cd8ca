// choose(): the fastest algorithm of the catalogue, and the best size of its segments. predict():
// what one of the caller's own takes.
#include <algorithm>
#include <cmath>

#include "gradwire/schedule/cost.h"
#include "gradwire/schedule/frames.h"

namespace gradwire::schedule {
namespace {

constexpr double kLeastSegment = 8 * 1024;  // bytes
constexpr std::size_t kFewMessages = 4096;  // of a schedule whose segments are searched for
// Messages times segments of one simulation; of more segments, the rest is extrapolated.
constexpr std::size_t kMostFrames = 8192;

std::vector<int> host_of(const Question& question) {
  std::vector<int> hosts(static_cast<std::size_t>(question.ranks), 0);
  for (std::size_t h = 0; h < question.hosts.size(); ++h)
    for (Rank rank : question.hosts[h]) hosts[static_cast<std::size_t>(rank)] = static_cast<int>(h);
  return hosts;
}

std::vector<std::string> candidates(const Question& question) {
  std::vector<std::string> names;  // of equals the first is taken
  for (std::string_view name : algorithms(question.collective))
    if (!question.codec || name != "recursive_doubling") names.emplace_back(name);
  const std::size_t hosts = question.hosts.size();
  const bool nested = hosts > 1 && hosts < static_cast<std::size_t>(question.ranks);
  if (question.collective == Collective::kAllReduce && nested)
    for (const char* inner : {"direct", "binary_tree"})
      for (const char* outer : {"direct", "ring", "halving_doubling"})
        names.push_back("hierarchical(" + std::string(inner) + "," + outer + ")");
  std::stable_partition(names.begin(), names.end(),
                        [](const std::string& name) { return name == "direct"; });
  return names;
}

Recipe recipe_of(const Question& question, const std::string& algorithm) {
  return {question.collective, algorithm, question.ranks, question.root, question.hosts};
}

// No schedule of this shape is faster, as long as its rounds wait for each other.
double least_seconds(const CostModel& model, const Question& question, const Shape& shape) {
  const bool one_host = question.hosts.size() <= 1;
  const bool apart = question.hosts.size() == static_cast<std::size_t>(question.ranks);
  auto of = [&](const LinkCost& link) {
    const double bytes = shape.max_sent * question.bytes * question.ratio;
    return shape.rounds * (2 * link.alpha + link.latency) + bytes * std::max(link.beta, link.copy);
  };
  if (one_host) return of(model.within);
  return apart ? of(model.between) : std::min(of(model.within), of(model.between));
}

// One schedule, and the segments that are best for it.
class Trial {
 public:
  Trial(const CostModel& model, const Question& question, const Schedule& schedule)
      : model_(model),
        work_{std::vector<double>(static_cast<std::size_t>(schedule.chunks),
                                  question.bytes / schedule.chunks),
              1, host_of(question), question.codec, question.ratio},
        frames_(schedule, model, work_),
        most_message_(question.most_message) {
    for (const Frames::Message& message : frames_.messages())
      largest_ = std::max(largest_, message.wire);
    least_segments_ = std::max(1.0, std::ceil(largest_ / (most_message_ - kHeaderBytes)));
  }

  double unchosen() {
    const double most = most_message_ - kHeaderBytes;
    const double wanted = std::floor(largest_ / static_cast<double>(kSegmentsWanted));
    const double target = std::min(std::max(wanted, static_cast<double>(kSmallestSegment)), most);
    return seconds_of(std::max(1, static_cast<int>(std::ceil(largest_ / target))),
                      std::numeric_limits<double>::infinity());
  }

  // Doubles the segments while that makes it faster.
  Choice best(double limit) {
    Choice found{{}, 0, limit};
    const bool searched = frames_.messages().size() <= kFewMessages;
    for (double segments = least_segments_;; segments *= 2) {
      const double seconds = seconds_of(static_cast<int>(segments), found.seconds);
      if (seconds >= found.seconds && segments > least_segments_) break;
      if (seconds < found.seconds)
        found = {{}, static_cast<std::size_t>(std::ceil(largest_ / segments)), seconds};
      if (!searched || largest_ / segments < 2 * kLeastSegment) break;
    }
    return found;
  }

 private:
  double seconds_of(int segments, double limit) {
    work_.segments = segments;
    const double busy = most_work(frames_, model_, work_);
    if (busy >= limit) return busy;
    const std::size_t room = kMostFrames / std::max<std::size_t>(1, frames_.messages().size());
    const int most = static_cast<int>(std::clamp<std::size_t>(room, 2, 16));
    if (segments <= most) return simulate(frames_, model_, work_, segments, limit);
    const double some = simulate(frames_, model_, work_, most / 2);
    const double more = simulate(frames_, model_, work_, most);
    const double each = std::max((more - some) / (most - most / 2), busy / segments);
    return more + each * (segments - most);
  }

  const CostModel& model_;
  Workload work_;
  Frames frames_;
  double most_message_;
  double largest_ = 0;  // bytes of a message
  double least_segments_ = 1;
};

}  // namespace

double predict(const CostModel& model, const Schedule& schedule, const Question& question) {
  return Trial(model, question, schedule).unchosen();
}

Choice choose(const CostModel& model, const Question& question) {
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
    if (found.seconds >= best.seconds) continue;
    best = found;
    best.algorithm = each.name;
  }
  return best;
}

}  // namespace gradwire::schedule
