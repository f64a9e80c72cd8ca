#include "gradwire/exec/plan_cache.h"

#include <numeric>

#include "gradwire/base/error.h"
#include "gradwire/schedule/generators.h"
#include "gradwire/schedule/verify.h"

namespace gradwire::exec {
namespace {

// Plans are small; a job that makes more shapes than this starts over.
constexpr std::size_t kMostPlans = 256;

const std::shared_ptr<const codec::Codec>& codec_of(const Request& request) {
  static const std::shared_ptr<const codec::Codec> none = codec::make_codec("none");
  return request.codec ? request.codec : none;
}

// Blocks of gather, scatter and all_to_all are each known to two ranks only.
bool counts_known_to_all(Collective collective) {
  return collective != Collective::kGather && collective != Collective::kScatter &&
         collective != Collective::kAllToAll;
}

void require_fits(const schedule::Schedule& schedule, const Request& request, int size) {
  if (schedule.ranks != size)
    throw ScheduleError("schedule '" + schedule.name + "' is for " +
                        std::to_string(schedule.ranks) + " ranks, this communicator has " +
                        std::to_string(size));
  if (schedule.collective != request.collective)
    throw ScheduleError("schedule '" + schedule.name + "' is a schedule of " +
                        std::string(name_of(schedule.collective)) + ", not of " +
                        std::string(name_of(request.collective)));
  if (schedule.root != request.root)
    throw ScheduleError("schedule '" + schedule.name + "' has root " +
                        std::to_string(schedule.root) + ", the call root " +
                        std::to_string(request.root));
}

}  // namespace

std::string choose_algorithm(Collective collective, std::uint64_t bytes, int ranks, bool lossy) {
  switch (collective) {
    case Collective::kAllReduce:
      if (bytes <= 16 * 1024 && !lossy && ranks > 2) return "recursive_doubling";
      return ranks <= 16 ? "direct" : "ring";
    case Collective::kReduceScatter:
    case Collective::kAllGather:
      return ranks <= 16 ? "direct" : "ring";
    case Collective::kReduce:
    case Collective::kBroadcast:
      return ranks <= 4 ? "star" : "binary_tree";
    case Collective::kGather:
    case Collective::kScatter:
      return "star";
    case Collective::kAllToAll:
      return "direct";
  }
  return "ring";
}

bool PlanCache::matches(const Key& key, const Request& request, std::uint64_t digest) const {
  return key.digest == digest && key.collective == request.collective &&
         key.dtype == request.dtype && key.op == request.op && key.root == request.root &&
         (request.schedule != nullptr || key.algorithm == request.algorithm) &&
         key.schedule_digest == request.schedule_digest && key.codec == codec_of(request).get() &&
         key.codec_label == request.codec_label && key.counts == counts_;
}

std::shared_ptr<const Plan> PlanCache::find(const Request& request,
                                            const std::vector<int>& link_of) {
  Operation::counts(request, setting_.rank, setting_.size, counts_);
  Fnv1a hash;
  for (std::uint64_t count : counts_) hash.number(count);
  const std::uint64_t digest = hash.digest();
  for (Entry& entry : entries_)
    if (matches(entry.key, request, digest)) return entry.plan;
  return make(request, link_of, digest);
}

schedule::Schedule PlanCache::schedule_for(const Request& request) const {
  if (request.schedule != nullptr) {
    require_fits(*request.schedule, request, setting_.size);
    schedule::require_valid(*request.schedule);
    return *request.schedule;
  }
  std::string algorithm(request.algorithm);
  if (algorithm == "auto") {
    const std::uint64_t bytes =
        std::accumulate(counts_.begin(), counts_.end(), std::uint64_t{0}) * size_of(request.dtype);
    const bool lossy = codec_of(request)->combine() != codec::Combine::kPlain;
    algorithm = choose_algorithm(request.collective, bytes, setting_.size, lossy);
  }
  return schedule::generate(
      {request.collective, algorithm, setting_.size, request.root, setting_.hosts});
}

std::shared_ptr<const Plan> PlanCache::make(const Request& request, const std::vector<int>& link_of,
                                            std::uint64_t digest) {
  if (request.root < 0 || request.root >= setting_.size)
    throw InvalidArgument("root " + std::to_string(request.root) +
                          " is not a rank; this communicator has " + std::to_string(setting_.size));
  const schedule::Schedule schedule = schedule_for(request);
  Binding binding;
  binding.rank = setting_.rank;
  binding.codec = codec_of(request);
  binding.in_tree = schedule::verify(schedule).in_tree;
  binding.max_message = setting_.max_message;
  binding.segment_bytes = setting_.segment_bytes;
  binding.link_of = link_of;
  binding.uniform_segments = counts_known_to_all(request.collective);
  binding.counts = counts_;
  OpSpec& spec = binding.spec;
  spec = {request.collective, request.dtype,           request.op,           request.root, {},
          schedule.name,      request.schedule_digest, binding.codec->name()};
  if (!request.codec_label.empty()) spec.codec = request.codec_label;
  if (binding.uniform_segments) spec.counts = counts_;
  auto plan = std::make_shared<const Plan>(schedule, std::move(binding));
  if (entries_.size() >= kMostPlans) entries_.clear();
  entries_.push_back({{digest, request.collective, request.dtype, request.op, request.root,
                       std::string(request.algorithm), request.schedule_digest,
                       codec_of(request).get(), std::string(request.codec_label), counts_},
                      plan});
  return plan;
}

}  // namespace gradwire::exec
