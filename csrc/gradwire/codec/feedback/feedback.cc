#include "gradwire/codec/feedback/feedback.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::codec {
namespace {

void check_length(const std::string& key, std::size_t stored, std::size_t wanted) {
  if (stored == 0 || stored == wanted) return;
  throw InvalidArgument("error feedback: key '" + key + "' has a residual of " +
                        std::to_string(stored) + " elements, this call has " +
                        std::to_string(wanted) + "; use another key, or clear()");
}

void check_closed(const std::string& key, bool open) {
  if (!open) return;
  throw InvalidArgument("error feedback: key '" + key +
                        "' is in an unfinished call; wait for it, and give each key once a call");
}

void check_finite(const std::string& key, std::span<const float> values, const char* what) {
  if (kernels().finite(values.data(), values.size())) return;
  throw InvalidArgument("error feedback: " + std::string(what) + " '" + key +
                        "' would hold NaN or Inf; nothing was changed");
}

// Returns whether a codec can adapt to this magnitude.
bool usable(float magnitude) { return magnitude >= 0 && std::isfinite(magnitude); }

void check_kept(const std::string& key, const ErrorFeedback::SavedKey& saved) {
  check_finite(key, saved.residual, "the residual of key");
  check_finite(key, saved.memory, "the codec's memory of key");
  if (usable(saved.codec_state.tau) && usable(saved.codec_state.filter)) return;
  throw InvalidArgument("error feedback: tau " + std::to_string(saved.codec_state.tau) +
                        " and filter " + std::to_string(saved.codec_state.filter) + " of key '" +
                        key + "' must be finite and not below 0; nothing was changed");
}

float scaled(float magnitude, double factor) {
  const double most = std::numeric_limits<float>::max();
  return static_cast<float>(std::min(magnitude * std::fabs(factor), most));
}

// Calls each(first, values) for all n elements of a residual, a few thousand at a time. An empty
// residual reads as −0, since x + −0 is x.
template <typename Each>
void for_spans(const Residual& residual, std::size_t n, Each each) {
  std::array<float, 4096> room;
  for (std::size_t i = 0; i < n; i += room.size()) {
    const auto values = std::span(room).first(std::min(room.size(), n - i));
    std::ranges::fill(values, -0.0F);
    if (!residual.empty()) residual.read(i, values);
    each(i, values);
  }
}

}  // namespace

ErrorFeedback::FeedbackKey::FeedbackKey(ResidualType type, const std::string& key)
    : current(type), next(type), name_digest(Fnv1a().text(key).digest()) {}

void ErrorFeedback::FeedbackKey::put(SavedKey saved) {
  current.codec_state = saved.codec_state;
  current.calls = saved.calls;
  current.memory = std::move(saved.memory);
  current.residual.assign(std::move(saved.residual), number());
  changes = 0;
}

void ErrorFeedback::Transaction::open(ErrorFeedback& owner, std::span<const KeyedArray> arrays) {
  settle(false);
  const std::lock_guard lock(owner.mutex_);
  try {
    for (const KeyedArray& array : arrays) owner.open(array, key_states_);
  } catch (...) {
    owner.close(key_states_, /*keep=*/false);
    key_states_.clear();
    throw;
  }
  ++owner.unsettled_;
  owner_ = &owner;
}

std::size_t ErrorFeedback::Transaction::size(std::size_t array) const {
  return key_states_.at(array)->next.residual.size();
}

EncodeContext ErrorFeedback::Transaction::context(std::size_t array) const {
  FeedbackKey& key_state = *key_states_.at(array);
  EncodeContext context;
  context.call = key_state.number();
  context.codec_state = &key_state.next.codec_state;
  key_state.current.residual.read_by(context);
  key_state.next.residual.write_by(context);
  return context;
}

std::vector<float> ErrorFeedback::Transaction::residual(std::size_t array) const {
  return key_states_.at(array)->current.residual.values();
}

std::span<const float> ErrorFeedback::Transaction::memory(std::size_t array) const {
  return key_states_.at(array)->current.memory;
}

std::vector<float>& ErrorFeedback::Transaction::next_memory(std::size_t array) {
  key_states_.at(array)->remembers = true;
  return key_states_.at(array)->next.memory;
}

void ErrorFeedback::Transaction::settle(bool keep) noexcept { close(/*of_step=*/true, keep); }

void ErrorFeedback::Transaction::cancel() noexcept { close(/*of_step=*/false, /*keep=*/false); }

void ErrorFeedback::Transaction::close(bool of_step, bool keep) noexcept {
  if (owner_ == nullptr) return;
  const std::lock_guard lock(owner_->mutex_);
  --owner_->unsettled_;
  if (of_step && owner_->in_step_) {
    owner_->tainted_ = owner_->tainted_ || !keep;
    owner_->of_step_.insert(owner_->of_step_.end(), key_states_.begin(), key_states_.end());
  } else {
    owner_->close(key_states_, keep);
  }
  owner_ = nullptr;
  key_states_.clear();
}

// Called under the mutex, like open() and require_closed(). Keeping a call swaps e and e', so
// nothing is copied, and the old e becomes the memory of the next e'.
void ErrorFeedback::close(const std::vector<FeedbackKey*>& key_states, bool keep) noexcept {
  for (FeedbackKey* key_state : key_states) {
    key_state->open = false;
    if (!keep) continue;
    key_state->current.residual.swap(key_state->next.residual);
    key_state->current.codec_state = key_state->next.codec_state;
    ++key_state->current.calls;
    key_state->changes = 0;
    if (key_state->remembers) key_state->current.memory.swap(key_state->next.memory);
  }
}

// Opens a key. A codec adapts from tau and filter; what it sends is counted anew in each call.
void ErrorFeedback::open(const KeyedArray& array, std::vector<FeedbackKey*>& opened) {
  FeedbackKey& key_state = this->key_state(array.key);
  check_closed(array.key, key_state.open);
  check_length(array.key, key_state.current.residual.size(), array.count);
  key_state.next.residual.resize(array.count);
  key_state.next.codec_state = {.tau = key_state.current.codec_state.tau,
                                .filter = key_state.current.codec_state.filter};
  key_state.open = true;
  key_state.remembers = false;
  opened.push_back(&key_state);
}

ErrorFeedback::FeedbackKey& ErrorFeedback::key_state(const std::string& key) {
  return key_states_.try_emplace(key, type_, key).first->second;
}

void ErrorFeedback::begin_step() {
  const std::lock_guard lock(mutex_);
  if (in_step_) throw InvalidArgument("error feedback: end the step before you begin another");
  if (unsettled_ > 0)
    throw InvalidArgument("error feedback: a call is unfinished; wait for it before a step begins");
  in_step_ = true;
  tainted_ = false;
}

bool ErrorFeedback::end_step(bool keep) {
  const std::lock_guard lock(mutex_);
  if (!in_step_) throw InvalidArgument("error feedback: no step was begun");
  if (unsettled_ > 0)
    throw InvalidArgument("error feedback: a call is unfinished; wait for it before the step ends");
  keep = keep && !tainted_;
  close(of_step_, keep);
  of_step_.clear();
  in_step_ = false;
  return keep;
}

std::vector<float> ErrorFeedback::residual(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = key_states_.find(key);
  return found == key_states_.end() ? std::vector<float>()
                                    : found->second.current.residual.values();
}

void ErrorFeedback::mask(const std::string& key, std::span<float> values) const {
  const FloatEnvironment environment;
  const std::lock_guard lock(mutex_);
  const auto found = key_states_.find(key);
  if (found == key_states_.end() || found->second.current.residual.empty()) {
    std::ranges::fill(values, 0.0F);
    return;
  }
  const Residual& residual = found->second.current.residual;
  check_length(key, residual.size(), values.size());
  for_spans(residual, values.size(), [&](std::size_t first, std::span<float> waiting) {
    for (std::size_t i = 0; i < waiting.size(); ++i)
      if (waiting[i] == 0) values[first + i] = 0;
  });
}

template <typename Changed>
void ErrorFeedback::change(const std::string& key, std::span<const float> values, Changed changed) {
  const FloatEnvironment environment;
  const std::lock_guard lock(mutex_);
  FeedbackKey& key_state = this->key_state(key);
  check_closed(key, key_state.open);
  const Residual& residual = key_state.current.residual;
  check_length(key, residual.size(), values.size());
  const std::uint64_t draw = key_state.draw();
  key_state.next.residual.resize(values.size());
  for_spans(residual, values.size(), [&](std::size_t first, std::span<float> made) {
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = changed(made[i], values[first + i]);
    check_finite(key, made, "after this change the residual of key");
    key_state.next.residual.write(first, made, draw);
  });
  key_state.current.residual.swap(key_state.next.residual);
}

void ErrorFeedback::add(const std::string& key, std::span<const float> values) {
  change(key, values, [](float kept, float value) { return kept + value; });
}

void ErrorFeedback::set(const std::string& key, std::span<const float> values) {
  change(key, values, [](float, float value) { return value; });
}

void ErrorFeedback::multiply(const std::string& key, std::span<const float> factors) {
  change(key, factors, [](float kept, float factor) { return kept * factor; });
}

void ErrorFeedback::require_closed() const {
  for (const auto& [key, key_state] : key_states_) check_closed(key, key_state.open);
}

void ErrorFeedback::scale(double factor) {
  if (!std::isfinite(factor))
    throw InvalidArgument("error feedback: scale by " + std::to_string(factor) +
                          " would lose every residual; use clear() for that");
  const FloatEnvironment environment;
  const std::lock_guard lock(mutex_);
  require_closed();
  for (auto& [key, key_state] : key_states_) {
    const Residual& residual = key_state.current.residual;
    Residual& product = key_state.next.residual;
    const std::uint64_t draw = key_state.draw();
    product.resize(residual.size());
    for_spans(residual, residual.size(), [&](std::size_t first, std::span<float> values) {
      for (float& each : values) each = static_cast<float>(each * factor);
      check_finite(key, values, "so scaled the residual of key");
      product.write(first, values, draw);
    });
  }
  for (auto& [key, key_state] : key_states_) {
    key_state.current.residual.swap(key_state.next.residual);
    CodecState& codec_state = key_state.current.codec_state;
    codec_state = {.tau = scaled(codec_state.tau, factor),
                   .filter = scaled(codec_state.filter, factor)};
  }
}

void ErrorFeedback::clear() {
  const std::lock_guard lock(mutex_);
  require_closed();
  key_states_.clear();
}

ErrorFeedback::SavedKey ErrorFeedback::take(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = key_states_.find(key);
  if (found == key_states_.end()) return {};
  check_closed(key, found->second.open);
  KeyVersion& stored = found->second.current;
  SavedKey saved{std::move(stored.residual).values(), stored.codec_state, stored.calls,
                 std::move(stored.memory)};
  key_states_.erase(found);
  return saved;
}

void ErrorFeedback::put(const std::string& key, SavedKey saved) {
  check_kept(key, saved);
  const std::lock_guard lock(mutex_);
  FeedbackKey& key_state = this->key_state(key);
  check_closed(key, key_state.open);
  key_state.put(std::move(saved));
}

std::vector<KeyedArray> ErrorFeedback::keys() const {
  const std::lock_guard lock(mutex_);
  std::vector<KeyedArray> all;
  for (const auto& [key, key_state] : key_states_)
    if (!key_state.current.residual.empty())
      all.push_back({key, key_state.current.residual.size()});
  return all;
}

ErrorFeedback::State ErrorFeedback::save() const {
  const std::lock_guard lock(mutex_);
  State state;
  for (const auto& [key, key_state] : key_states_) {
    const KeyVersion& its = key_state.current;
    const bool unused = its.calls == 0 && its.residual.empty() && its.memory.empty();
    if (!unused) state[key] = {its.residual.values(), its.codec_state, its.calls, its.memory};
  }
  return state;
}

void ErrorFeedback::load(State state) {
  for (const auto& [key, saved] : state) check_kept(key, saved);
  std::map<std::string, FeedbackKey> loaded;
  for (auto& [key, saved] : state)
    loaded.try_emplace(key, type_, key).first->second.put(std::move(saved));
  const std::lock_guard lock(mutex_);
  require_closed();
  key_states_.swap(loaded);
}

}  // namespace gradwire::codec
