// Symbolic execution of a schedule for chunks that the same edges move: one run serves all of them.
// A rank holds a Sums::Id, which stands for the value with all its roundings: two ranks that hold
// the same id have the same bits.
#include "gradwire/schedule/chunk_class.h"

#include <bit>

#include "gradwire/schedule/rules.h"

namespace gradwire::schedule {
namespace {

// Returns "rank 2", "ranks 0, 1, 5" or "ranks 0, 1, 2 and 5 more".
std::string list(const std::vector<Rank>& ranks) {
  constexpr std::size_t kShown = 3;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(kShown, ranks.size()); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

// Returns what identifies the sum of a and b, in either order: floating-point addition is
// commutative but not associative.
std::uint64_t unordered_pair(Sums::Id a, Sums::Id b) {
  const auto [low, high] = std::minmax(a, b);
  return static_cast<std::uint64_t>(high) << 32 | static_cast<std::uint64_t>(low);
}

}  // namespace

Sums::Sums(int ranks) : ranks_(ranks), words_((at(ranks) + 63) / 64) {
  const auto p = at(ranks);
  counted_.resize(p * words_);
  repetitions_.resize(p);
  for (std::size_t r = 0; r < p; ++r) counted_[r * words_ + r / 64] = std::uint64_t{1} << (r % 64);
}

void Sums::reset() {
  const auto p = at(ranks_);
  counted_.resize(p * words_);
  repetitions_.resize(p);
  made_.clear();
}

Sums::Id Sums::add(Id a, Id b, const EdgeStep& step) {
  const auto [entry, is_new] =
      made_.try_emplace(unordered_pair(a, b), static_cast<Id>(repetitions_.size()));
  if (!is_new) return entry->second;
  repetitions_.push_back(repeated_in(a, b, step));
  counted_.resize(counted_.size() + words_);
  std::uint64_t* both = counted_.data() + counted_.size() - words_;
  for (std::size_t w = 0; w < words_; ++w) both[w] = counted(a)[w] | counted(b)[w];
  return entry->second;
}

Sums::Repetition Sums::repeated_in(Id a, Id b, const EdgeStep& step) const {
  for (Id part : {a, b})
    if (repetition(part).step != nullptr) return repetition(part);
  for (std::size_t w = 0; w < words_; ++w)
    if (const std::uint64_t shared = counted(a)[w] & counted(b)[w]; shared != 0)
      return {&step, static_cast<Rank>(w * 64) + std::countr_zero(shared)};
  return {};
}

bool Sums::complete(Id sum) const {
  int count = 0;
  for (std::size_t w = 0; w < words_; ++w) count += std::popcount(counted(sum)[w]);
  return count == ranks_;
}

std::vector<Rank> Sums::missing(Id sum) const {
  std::vector<Rank> ranks;
  for (Rank r = 0; r < ranks_; ++r)
    if ((counted(sum)[r / 64] >> (r % 64) & 1) == 0) ranks.push_back(r);
  return ranks;
}

ChunkClass::ChunkClass(const Schedule& schedule, Findings& findings)
    : schedule_(schedule), findings_(findings), sums_(schedule.ranks) {}

void ChunkClass::run(ChunkRange chunks, std::span<const EdgeStep> steps) {
  begin(chunks);
  while (!steps.empty()) {
    std::size_t size = 1;
    while (size < steps.size() && steps[size].round == steps[0].round) ++size;
    run_round(steps.first(size));
    steps = steps.subspan(size);
  }
  check_end();
}

void ChunkClass::begin(ChunkRange chunks) {
  chunks_ = chunks;
  sums_.reset();
  states_.assign(at(schedule_.ranks), HeldValue{});
  for (Rank r = 0; r < schedule_.ranks; ++r)
    if (starts_at(r)) state(r).held = Sums::contribution(r);
}

// Collects what is sent before anything lands: edges of a round read what ranks held when it began.
void ChunkClass::run_round(std::span<const EdgeStep> steps) {
  sent_.clear();
  for (const EdgeStep& step : steps) sent_.push_back(state(step.edge->src).held);
  for (std::size_t i = 0; i < steps.size(); ++i) land(steps[i], sent_[i]);
}

void ChunkClass::land(const EdgeStep& step, Sums::Id value) {
  const Edge& edge = *step.edge;
  if (edge.src == edge.dst) return;  // find_deadlocks reports it
  if (value == kNothing)
    return findings_.incorrect([&] {
      return describe(step) + ", but rank " + std::to_string(edge.src) + " holds nothing of it";
    });
  if (collides(step))
    return findings_.incorrect([&] {
      return describe(step) +
             ", where another edge of that round lands too: only reductions may "
             "share a chunk, a copy must land alone";
    });
  if (edge.landing == Landing::kCopy) {
    if (reduces(schedule_.collective) && !sums_.complete(value)) findings_.not_in_tree();
    state(edge.dst).held = value;
  } else if (reduces(schedule_.collective)) {
    ++state(edge.src).reductions_sent;
    state(edge.dst).held = sums_.add(state(edge.dst).held, value, step);
  } else {
    findings_.incorrect([&] {
      return describe(step) + ", but " + std::string(name_of(schedule_.collective)) +
             " only moves data: use copy";
    });
  }
}

bool ChunkClass::collides(const EdgeStep& step) {
  HeldValue& target = state(step.edge->dst);
  const bool first = target.landed_in != step.round;
  const bool copy = step.edge->landing == Landing::kCopy;
  const bool collision = !first && (copy || target.copied);
  target.landed_in = step.round;
  target.copied = copy || (!first && target.copied);
  return collision;
}

void ChunkClass::check_end() {
  Rank reference = -1;
  bool agreed = true;
  for (Rank r = 0; r < schedule_.ranks; ++r) {
    if (!ends_at(r)) continue;
    check_rank(r, state(r).held);
    if (reference < 0) reference = r;
    if (agreed && state(r).held != state(reference).held) {
      agreed = false;
      findings_.disagreement([&] {
        return "at the end ranks " + std::to_string(reference) + " and " + std::to_string(r) +
               " hold " + to_string(chunks_) + " by different additions, so their bits may differ";
      });
    }
  }
  if (reduces(schedule_.collective)) check_in_tree();
}

void ChunkClass::check_rank(Rank rank, Sums::Id held) {
  const auto start = [&] { return "at the end rank " + std::to_string(rank); };
  if (held == kNothing)
    return findings_.incomplete(
        [&] { return start() + " holds nothing of " + to_string(chunks_); });
  if (!reduces(schedule_.collective)) return;
  if (!sums_.complete(held))
    findings_.incomplete([&] {
      return start() + " lacks what " + list(sums_.missing(held)) + " contributed to " +
             to_string(chunks_);
    });
  if (const auto repetition = sums_.repetition(held); repetition.step != nullptr)
    findings_.incorrect([&] {
      return describe(*repetition.step) + " a second time (contribution of rank " +
             std::to_string(repetition.rank) + " counted twice)";
    });
}

// If each of p-1 ranks sends one partial sum, and all of it arrives, the edges form a tree whose
// root is the one rank that sends none.
void ChunkClass::check_in_tree() {
  const auto sent = [](const HeldValue& state) { return state.reductions_sent; };
  const auto once = [&](const HeldValue& state) { return sent(state) == 1; };
  const auto never = [&](const HeldValue& state) { return sent(state) == 0; };
  const auto senders = std::count_if(states_.begin(), states_.end(), once);
  const auto roots = std::count_if(states_.begin(), states_.end(), never);
  if (senders != schedule_.ranks - 1 || roots != 1) findings_.not_in_tree();
}

bool ChunkClass::starts_at(Rank rank) const {
  using enum Collective;
  const Collective its = schedule_.collective;
  if (reduces(its)) return true;
  if (its == kAllGather || its == kGather) return rank == chunks_.first;
  return rank == (its == kAllToAll ? chunks_.first / schedule_.ranks : schedule_.root);
}

bool ChunkClass::ends_at(Rank rank) const {
  using enum Collective;
  const Collective its = schedule_.collective;
  if (its == kAllReduce || its == kAllGather || its == kBroadcast) return true;
  if (its == kReduceScatter || its == kScatter) return rank == chunks_.first;
  return rank == (its == kAllToAll ? chunks_.first % schedule_.ranks : schedule_.root);
}

std::string ChunkClass::describe(const EdgeStep& step) const {
  const Edge& edge = *step.edge;
  return "round " + std::to_string(step.round) + ": rank " + std::to_string(edge.dst) +
         (edge.landing == Landing::kCopy ? " copies " : " reduces ") + to_string(chunks_) +
         " from rank " + std::to_string(edge.src);
}

}  // namespace gradwire::schedule
