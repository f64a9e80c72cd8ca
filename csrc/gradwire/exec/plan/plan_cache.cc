#include "gradwire/exec/plan/plan_cache.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/exec/plan/method.h"
#include "gradwire/schedule/generators.h"
#include "gradwire/schedule/verify.h"
#include "gradwire/transport/transport.h"

namespace gradwire::exec {
namespace {

constexpr std::size_t kMostPlans = 256;  // they are small

// Adds to a cache. Where it is full, a random entry makes room: the oldest one would be the next to
// be asked for where calls of one shape too many follow each other in turn.
template <typename Cached>
Cached& add(std::vector<Cached>& cache, Cached next) {
  if (cache.size() < kMostPlans) return cache.emplace_back(std::move(next));
  thread_local std::minstd_rand random;
  return cache[random() % kMostPlans] = std::move(next);
}

const std::shared_ptr<const codec::Codec>& codec_of(const Request& request) {
  static const std::shared_ptr<const codec::Codec> none = codec::make_codec("none");
  return request.codec ? request.codec : none;
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

constexpr double kSlowLink = 8e-8;  // seconds a byte: 100 Mbit/s

// The size that blocks are taken to have if not all ranks know it.
constexpr double kUnknownBlock = 64 * 1024;

// Returns whether a sum of plain arrays is gathered: all ranks get all inputs, by an all_gather.
bool folds(const Request& request, std::string_view algorithm) {
  return request.schedule == nullptr && request.collective == Collective::kAllReduce &&
         codec_of(request)->combine() == codec::Combine::kPlain && is_gather(algorithm);
}

double bytes_of_all(const std::vector<std::uint64_t>& counts, const Request& request, int size) {
  if (!counts_known_to_all(request.collective)) return kUnknownBlock * size;
  const std::uint64_t elements = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  return static_cast<double>(elements) * static_cast<double>(size_of(request.dtype));
}

// Returns the bytes rounded up, in four steps per power of two.
double size_class(double bytes) {
  int exponent = 0;
  const double fraction = std::frexp(bytes, &exponent);
  return std::ldexp(std::ceil(fraction * 8), exponent - 3);
}

}  // namespace

schedule::CostModel built_in_model(std::string_view within, std::string_view between, int cores) {
  schedule::CostModel model =
      schedule::default_model(transport::transport_kind(within).within_host,
                              transport::transport_kind(between).between_hosts, cores);
  for (const std::string_view name : codec::codec_names()) {
    const auto codec = codec::make_codec(name);
    // Other codecs encode nothing: arrays travel as they are, or as collectives of plain arrays.
    if (codec->combine() != codec::Combine::kReencode) continue;
    const auto [encode, decode] = codec->seconds_per_byte();
    model.codecs.insert_or_assign(std::string(name), schedule::CodecCost{encode, decode});
  }
  return model;
}

PlanCache::PlanCache(Setting setting) : setting_(std::move(setting)) {
  set_model(built_in_model("shm", "tcp", setting_.size));
}

void PlanCache::set_model(schedule::CostModel model) {
  model_ = std::move(model);
  model_digest_ = model_.digest();
  slow_model_ = model_;
  slow_model_.between.beta = std::max(slow_model_.between.beta, kSlowLink);
  forget();
}

void PlanCache::set_sites(schedule::Sites sites) {
  setting_.sites = std::move(sites);
  forget();
}

std::shared_ptr<const codec::Codec> PlanCache::codec_for(const Request& request) const {
  if (!request.codec || !request.codec->between_sites() || has_sites()) return request.codec;
  check_types(request.collective, request.dtype, request.op, *request.codec);
  return nullptr;
}

void PlanCache::forget() {
  plans_.clear();
  choices_.clear();
}

bool PlanCache::matches(const Key& key, const Request& request, std::uint64_t digest) const {
  return key.digest == digest && key.collective == request.collective &&
         key.dtype == request.dtype && key.op == request.op && key.root == request.root &&
         (request.schedule != nullptr || key.algorithm == request.algorithm) &&
         key.schedule_digest == request.schedule_digest && key.codec == codec_of(request).get() &&
         key.codec_label == request.codec_label && key.moved == request.moved &&
         key.counts == counts_;
}

std::shared_ptr<const Plan> PlanCache::find(const Request& request,
                                            const std::vector<int>& link_of) {
  array_counts(request, counts_);
  Fnv1a hash;
  for (std::uint64_t count : counts_) hash.number(count);
  const std::uint64_t digest = hash.digest();
  for (CachedPlan& cached : plans_)
    if (matches(cached.key, request, digest)) return cached.plan;
  return make(request, link_of, digest);
}

void ask_for(const codec::Codec& codec, const schedule::CostModel& model,
             schedule::Question& question) {
  if (codec.combine() == codec::Combine::kPlain) return;
  const auto elements = static_cast<std::size_t>(question.bytes / sizeof(float)) + 1;
  question.codec = model.codec(codec.name());
  question.between_sites = codec.between_sites();
  question.ratio = static_cast<double>(codec.usual_bytes(elements)) /
                   static_cast<double>(elements * sizeof(float));
}

// Returns the model's choice; it is asked only once for calls of nearly the same size. The question
// is about frames of the usual size, not of this communicator's, since their size may change no
// bit.
const schedule::Choice& PlanCache::choose(Collective collective, double bytes,
                                          const Request& request) {
  const auto& codec = codec_of(request);
  const ChoiceKey key{collective, collective == request.collective ? request.root : 0,
                      size_class(bytes), codec.get(), request.spares_bytes};
  for (const CachedChoice& cached : choices_)
    if (cached.key == key) return cached.choice;
  schedule::Question question;
  question.collective = key.collective;
  question.ranks = setting_.size;
  question.root = key.root;
  question.bytes = key.bytes;
  question.hosts = setting_.hosts;
  question.sites = setting_.sites;
  ask_for(*codec, model_, question);
  const auto& model = key.spares_bytes ? slow_model_ : model_;
  return add(choices_, {key, codec, schedule::choose(model, question)}).choice;
}

// Returns the request's algorithm and segments, as far as the caller left the choice to the model.
schedule::Choice PlanCache::choose(const Request& request) {
  const double bytes = bytes_of_all(counts_, request, setting_.size);
  if (request.algorithm == "auto") return choose(request.collective, bytes, request);
  schedule::Choice choice{std::string(request.algorithm), 0, 0};
  if (!folds(request, choice.algorithm) || gather_algorithm(choice.algorithm) != "auto")
    return choice;
  choice = choose(Collective::kAllGather, setting_.size * bytes, request);
  choice.algorithm = "gather(" + choice.algorithm + ")";
  return choice;
}

schedule::Schedule PlanCache::schedule_for(const Request& request,
                                           const schedule::Choice& choice) const {
  const auto& groups = setting_.sites.ranks.size() > 1 ? setting_.sites.ranks : setting_.hosts;
  if (folds(request, choice.algorithm))
    return schedule::generate({Collective::kAllGather,
                               std::string(gather_algorithm(choice.algorithm)), setting_.size, 0,
                               groups});
  if (request.schedule == nullptr)
    return schedule::generate(
        {request.collective, choice.algorithm, setting_.size, request.root, groups});
  require_fits(*request.schedule, request, setting_.size);
  schedule::require_valid(*request.schedule);
  return *request.schedule;
}

std::shared_ptr<const Plan> PlanCache::make(const Request& request, const std::vector<int>& link_of,
                                            std::uint64_t digest) {
  schedule::Choice choice;
  if (request.schedule == nullptr) choice = choose(request);
  const bool chosen = request.schedule == nullptr && choice.algorithm != request.algorithm;
  const schedule::Schedule schedule = schedule_for(request, choice);
  Binding binding;
  binding.rank = setting_.rank;
  binding.codec = codec_of(request);
  binding.in_tree = schedule::verify(schedule).in_tree;
  binding.max_message = setting_.max_message;
  binding.segment_bytes =
      setting_.segment_bytes != 0 ? setting_.segment_bytes : choice.segment_bytes;
  binding.link_of = link_of;
  if (setting_.sites.ranks.size() > 1)
    binding.site_of = schedule::group_of(setting_.size, setting_.sites.ranks);
  binding.uniform_segments = counts_known_to_all(request.collective);
  binding.folds = folds(request, choice.algorithm);
  binding.counts = counts_;
  if (binding.folds)
    binding.counts.assign(at(setting_.size),
                          std::accumulate(counts_.begin(), counts_.end(), std::uint64_t{0}));
  OpSpec& spec = binding.spec;
  spec = spec_of(request);
  spec.algorithm = binding.folds ? choice.algorithm : schedule.name;
  spec.model = chosen ? model_digest_ : 0;
  if (binding.uniform_segments) spec.counts = counts_;
  return add(plans_,
             {{digest, request.collective, request.dtype, request.op, request.root,
               std::string(request.algorithm), request.schedule_digest, codec_of(request).get(),
               std::string(request.codec_label), std::string(request.moved), counts_},
              std::make_shared<const Plan>(schedule, std::move(binding))})
      .plan;
}

}  // namespace gradwire::exec
