#include "gradwire/serve/vectors/vectors.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "gradwire/base/error.h"
#include "gradwire/serve/shard/memory.h"
#include "gradwire/serve/vectors/block_sums.h"
#include "gradwire/serve/wire/message.h"

namespace gradwire::serve {
namespace {

constexpr std::size_t kMostSpare = 2;

std::string text_of(std::uint64_t batch, PushName push) {
  return str_cat("push ", push.sequence, " of replica ", push.replica, " to batch ", batch);
}

}  // namespace

void FinishedBatches::add(std::uint64_t batch) {
  if (has(batch)) return;
  batches_.insert(batch);
  if (batches_.size() <= kRemembered) return;
  below_ = *batches_.begin() + 1;
  batches_.erase(batches_.begin());
}

bool FinishedBatches::has(std::uint64_t batch) const {
  return batch < below_ || batches_.contains(batch);
}

std::uint64_t FinishedBatches::last() const { return batches_.empty() ? 0 : *batches_.rbegin(); }

// The vectors as the commands of one request have changed them so far.
class Vectors::Draft {
 public:
  explicit Draft(Vectors& owner) : owner_(owner), vectors_(owner.vectors_) {}

  CommandResult run(const Command& command) {
    return std::visit([this](const auto& given) { return (*this)(given); }, command);
  }
  void commit();

 private:
  using Source = std::pair<double, const float*>;

  CommandResult operator()(const command::Dots& given) const;
  CommandResult operator()(const command::Absmax& given) const;
  CommandResult operator()(const command::Abssum& given) const;
  CommandResult operator()(const command::WeightedSum& given);
  CommandResult operator()(const command::CopyVector& given);
  CommandResult operator()(const command::Drop& given);
  CommandResult operator()(const command::ListNames&) const;
  CommandResult operator()(const command::FoldPushes& given);
  CommandResult operator()(const command::Discard& given);

  const SharedWords& find(const std::string& name) const;
  SharedWords push_of(std::uint64_t batch, PushName push) const;
  void check_target(const std::string& name) const;
  void finish(std::uint64_t batch);
  SharedWords sum_of(std::span<const Source> sources) const;
  template <typename Body>
  void each_block(Body body) const;
  void widen_block(const float* x, std::size_t first, std::size_t n, double* y) const {
    widen(x + first * owner_.words_, owner_.words_, n, y);
  }

  Vectors& owner_;
  Map vectors_;
  std::set<std::uint64_t> finished_;
};

// Calls body(first element, number of elements) for each block.
template <typename Body>
void Vectors::Draft::each_block(Body body) const {
  for (std::size_t first = 0; first < owner_.elements_; first += owner_.block_)
    body(first, std::min(owner_.block_, owner_.elements_ - first));
}

const SharedWords& Vectors::Draft::find(const std::string& name) const {
  const auto found = vectors_.find(name);
  if (found != vectors_.end()) return found->second;
  throw InvalidArgument(name == kParameters ? "there are no initial values yet"
                                            : "there is no vector '" + name + "'");
}

// A new vector needs initial values, since it is of the parameters' elements, and room.
void Vectors::Draft::check_target(const std::string& name) const {
  find(std::string(kParameters));
  check_vector_name(name);
  if (!vectors_.contains(name)) owner_.check_room(vectors_.size() + 1, owner_.staged());
}

// Each vector is read once for all pairs, a block at a time.
CommandResult Vectors::Draft::operator()(const command::Dots& given) const {
  std::vector<const float*> vectors;
  const auto index_of = [&](const std::string& name) {
    const float* const values = find(name)->data();
    const auto found = std::ranges::find(vectors, values);
    if (found == vectors.end()) vectors.push_back(values);
    return static_cast<std::size_t>(std::ranges::find(vectors, values) - vectors.begin());
  };
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  for (const auto& [x, y] : given.pairs) {
    const std::size_t first = index_of(x);
    pairs.emplace_back(first, index_of(y));
  }
  std::vector<ExactSum> sums(pairs.size());
  std::vector<std::array<double, kMostBlock>> wide(vectors.size());
  each_block([&](std::size_t first, std::size_t n) {
    for (std::size_t i = 0; i < vectors.size(); ++i)
      widen_block(vectors[i], first, n, wide[i].data());
    for (std::size_t i = 0; i < pairs.size(); ++i)
      sums[i].add(dot(wide[pairs[i].first].data(), wide[pairs[i].second].data(), n));
  });
  CommandResult result;
  for (const ExactSum& each : sums) result.numbers.push_back(each.parts());
  return result;
}

CommandResult Vectors::Draft::operator()(const command::Absmax& given) const {
  const float* const x = find(given.name)->data();
  std::array<double, kMostBlock> wide;
  double most = 0;
  each_block([&](std::size_t first, std::size_t n) {
    widen_block(x, first, n, wide.data());
    const double here = absolute_maximum(wide.data(), n);
    if (!(here <= most)) most = std::isnan(most) ? most : here;
  });
  return {.numbers = {{most}}};
}

CommandResult Vectors::Draft::operator()(const command::Abssum& given) const {
  const float* const x = find(given.name)->data();
  std::array<double, kMostBlock> wide;
  ExactSum sum;
  each_block([&](std::size_t first, std::size_t n) {
    widen_block(x, first, n, wide.data());
    sum.add(absolute_sum(wide.data(), n));
  });
  return {.numbers = {sum.parts()}};
}

SharedWords Vectors::Draft::sum_of(std::span<const Source> sources) const {
  const std::shared_ptr<Words> target = owner_.fresh();
  std::array<double, kMostBlock> wide, sum;
  each_block([&](std::size_t first, std::size_t n) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const auto [coefficient, x] = sources[i];
      widen_block(x, first, n, wide.data());
      if (i == 0)
        scale(coefficient, wide.data(), n, sum.data());
      else
        add_scaled(coefficient, wide.data(), n, sum.data());
    }
    narrow(sum.data(), owner_.words_, n, target->data() + first * owner_.words_);
  });
  return target;
}

CommandResult Vectors::Draft::operator()(const command::WeightedSum& given) {
  check_target(given.target);
  if (given.terms.empty()) throw InvalidArgument("combine: there are no terms");
  std::vector<Source> sources;
  for (const auto& [coefficient, source] : given.terms)
    sources.emplace_back(coefficient, find(source)->data());
  vectors_[given.target] = sum_of(sources);
  return {};
}

CommandResult Vectors::Draft::operator()(const command::CopyVector& given) {
  check_target(given.target);
  const SharedWords source = find(given.source);
  vectors_[given.target] = source;
  return {};
}

CommandResult Vectors::Draft::operator()(const command::Drop& given) {
  find(given.name);
  if (given.name == kParameters) throw InvalidArgument("drop: 'w' are the parameters, which stay");
  vectors_.erase(given.name);
  return {};
}

CommandResult Vectors::Draft::operator()(const command::ListNames&) const {
  CommandResult result;
  for (const auto& [name, values] : vectors_) result.names.push_back(name);
  return result;
}

SharedWords Vectors::Draft::push_of(std::uint64_t batch, PushName push) const {
  const auto found = owner_.staged_.find(batch);
  if (found != owner_.staged_.end())
    if (const auto named = found->second.find(push); named != found->second.end())
      return named->second;
  throw InvalidArgument("fold: there is no " + text_of(batch, push));
}

CommandResult Vectors::Draft::operator()(const command::FoldPushes& given) {
  check_target(given.target);
  if (owner_.finished_.has(given.batch) || finished_.contains(given.batch))
    throw InvalidArgument(
        str_cat("fold: batch ", given.batch, " is over: it was folded or discarded"));
  if (given.pushes.empty()) throw InvalidArgument("fold: there are no pushes");
  std::vector<Source> sources;
  for (const PushName& each : given.pushes)
    sources.emplace_back(1.0, push_of(given.batch, each)->data());
  vectors_[given.target] = sum_of(sources);
  finished_.insert(given.batch);
  return {};
}

CommandResult Vectors::Draft::operator()(const command::Discard& given) {
  if (given.all)
    for (const auto& [batch, pushes] : owner_.staged_) finished_.insert(batch);
  else
    finished_.insert(given.batch);
  return {};
}

void Vectors::Draft::commit() {
  owner_.vectors_.swap(vectors_);
  owner_.recycle(vectors_);
  for (const std::uint64_t batch : finished_) {
    owner_.finished_.add(batch);
    owner_.staged_.erase(batch);
  }
}

Vectors::Vectors(std::size_t elements, std::size_t words, std::size_t block, VectorLimits limits)
    : elements_(elements), words_(words), block_(block), limits_(limits) {}

SharedWords Vectors::find(std::string_view name) const {
  const auto found = vectors_.find(std::string(name));
  return found == vectors_.end() ? nullptr : found->second;
}

void Vectors::put(const std::string& name, Words values) {
  check_vector_name(name);
  if (values.size() != elements_ * words_)
    throw InvalidArgument(
        str_cat("vector '", name, "' has ", values.size(), " words, not ", elements_ * words_));
  if (!vectors_.contains(name)) check_room(vectors_.size() + 1, staged());
  vectors_[name] = std::make_shared<Words>(std::move(values));
}

std::size_t Vectors::staged() const noexcept {
  std::size_t count = 0;
  for (const auto& [batch, pushes] : staged_) count += pushes.size();
  return count;
}

bool Vectors::keeps(const StagedPush& push) const {
  if (finished_.has(push.batch)) return false;
  const auto found = staged_.find(push.batch);
  return found == staged_.end() || !found->second.contains(push.name);
}

std::optional<Vectors::Arrival> Vectors::arrive(const StagedPush& push) {
  if (!keeps(push)) return std::nullopt;
  check_room(vectors_.size(), staged() + 1);
  return Arrival(arriving_);
}

void Vectors::stage(const StagedPush& push, Words values) {
  if (!keeps(push)) return;
  check_room(vectors_.size(), staged() + 1);
  staged_[push.batch][push.name] = std::make_shared<Words>(std::move(values));
}

std::uint64_t Vectors::last_batch() const {
  return std::max(finished_.last(), staged_.empty() ? 0 : staged_.rbegin()->first);
}

std::vector<CommandResult> Vectors::run(std::span<const Command> commands) {
  Draft draft(*this);
  std::vector<CommandResult> results;
  for (const Command& each : commands) results.push_back(draft.run(each));
  if (pack(results).size() > kMostPayload)
    throw InvalidArgument("the results are longer than a message: ask for fewer at a time");
  draft.commit();
  return results;
}

// Arriving pushes count too.
void Vectors::check_room(std::size_t vectors, std::size_t pushes) const {
  pushes += arriving_;
  if (vectors > limits_.vectors)
    throw InvalidArgument(str_cat("a shard holds at most ", limits_.vectors, " vectors"));
  if (pushes > limits_.pushes)
    throw InvalidArgument(str_cat("a shard holds at most ", limits_.pushes,
                                  " staged pushes: give a larger push_every, or fewer portions"));
  const std::uint64_t each = elements_ * words_ * sizeof(float);
  if ((vectors + pushes + spare_.size()) * each > limits_.bytes)
    throw InvalidArgument(
        str_cat(vectors, " vectors and ", pushes, " staged pushes of ", gibibytes(each),
                " are more than this shard may hold, ", gibibytes(limits_.bytes),
                ", half of its memory: give more shards on more hosts, or a larger "
                "push_every, so that there are fewer pushes"));
}

// Returns memory for a vector, whose values are undefined.
std::shared_ptr<Words> Vectors::fresh() {
  if (spare_.empty()) return std::make_shared<Words>(elements_ * words_);
  std::shared_ptr<Words> taken = std::move(spare_.back());
  spare_.pop_back();
  return taken;
}

// Keeps the memory of vectors that nobody holds: allocating it costs more than writing to it. All
// of it was allocated without const.
void Vectors::recycle(Map& old) {
  for (auto& [name, values] : old)
    if (values.use_count() == 1 && spare_.size() < kMostSpare)
      spare_.push_back(std::const_pointer_cast<Words>(std::move(values)));
}

}  // namespace gradwire::serve
