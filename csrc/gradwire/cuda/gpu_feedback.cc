#include "gradwire/cuda/gpu_feedback.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <set>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"

namespace gradwire::cuda {
namespace {

void check_keys(std::span<const codec::KeyedArray> arrays) {
  std::set<std::string_view> seen;
  for (const auto& each : arrays)
    if (!seen.insert(each.key).second)
      throw InvalidArgument("error feedback: key '" + each.key + "' is given twice in one call");
}

void check_length(const codec::KeyedArray& array, std::size_t stored) {
  if (stored == array.count) return;
  throw InvalidArgument("error feedback: key '" + array.key + "' has a residual of " +
                        std::to_string(stored) + " elements, this call has " +
                        std::to_string(array.count) + "; use another key, or clear()");
}

[[noreturn]] void refuse_in_capture() {
  throw InvalidArgument(
      "error feedback: a call that is captured in a CUDA graph has new keys: make the same call "
      "once before the capture begins");
}

// Returns whether all values have the bits of `value`: -0 is not +0.
bool are_all(const std::vector<float>& values, float value) {
  return std::ranges::all_of(values, [bits = std::bit_cast<std::uint32_t>(value)](float each) {
    return std::bit_cast<std::uint32_t>(each) == bits;
  });
}

}  // namespace

GpuFeedback::GpuFeedback(const Api& api, std::shared_ptr<codec::ErrorFeedback> host)
    : api_(api),
      host_(std::move(host)),
      step_room_(api),
      copies_(api),
      ended_(api),
      scaled_(api),
      loss_scale_room_(api) {
  step_flags_ = reinterpret_cast<std::uint32_t*>(step_room_.take(kPayloadAlignment));
  loss_scale_ = reinterpret_cast<float*>(loss_scale_room_.take(kPayloadAlignment));
  set_loss_scale(0);
}

// Waits for the device: releasing memory may not wait, and calls or graphs may still use it.
GpuFeedback::~GpuFeedback() { await_device(api_); }

float* GpuFeedback::zeros(OwnedKey& owned, std::uint64_t count, Stream stream) {
  Room& room = owned.rooms.emplace_back(api_);
  auto* data = reinterpret_cast<float*>(room.take(std::max<std::size_t>(4 * count, 4)));
  check(api_, api_.fill(data, 0, 4 * count, stream), "cudaMemsetAsync");
  return data;
}

GpuFeedback::OwnedKey& GpuFeedback::make(const codec::KeyedArray& array, Stream stream) {
  auto owned = std::make_unique<OwnedKey>();
  DeviceKey& key = owned->key;
  Room& room = owned->rooms.emplace_back(api_);
  key.key_state = reinterpret_cast<GpuKeyState*>(room.take(sizeof(GpuKeyState)));
  key.count = array.count;
  key.digest = Fnv1a().text(array.key).digest();
  for (float*& each : key.residual) each = zeros(*owned, array.count, stream);
  return *keys_.emplace(array.key, std::move(owned)).first->second;
}

void GpuFeedback::make_memory(OwnedKey& owned, std::uint64_t count, Stream stream) {
  if (owned.key.remembered >= count) return;
  for (float*& each : owned.key.memory) {
    float* const before = each;
    each = zeros(owned, count, stream);
    check(api_, api_.copy(each, before, 4 * owned.key.remembered, CopyKind::kOnDevice, stream),
          "cudaMemcpyAsync");
  }
  owned.key.remembered = count;
}

void GpuFeedback::remember(const KeyTable& table, std::span<const std::uint64_t> counts,
                           const CallStream& stream) {
  for (auto& [name, owned] : keys_)
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (table.keys[i] != &owned->key || owned->key.remembered >= counts[i]) continue;
      if (stream.is_captured()) refuse_in_capture();
      make_memory(*owned, counts[i], stream);
    }
}

GpuFeedback::OwnedKey& GpuFeedback::find(const codec::KeyedArray& array, Stream stream) {
  const auto found = keys_.find(array.key);
  if (found != keys_.end()) return *found->second;
  const auto start = host_->take(array.key);
  OwnedKey& owned = make(array, stream);
  if (!start.memory.empty()) make_memory(owned, start.memory.size(), stream);
  write(owned.key, start, stream);
  return owned;
}

const GpuFeedback::KeyTable& GpuFeedback::open(std::span<const codec::KeyedArray> arrays,
                                               const CallStream& stream) {
  names_.clear();
  for (const auto& each : arrays) names_.push_back(each.key);
  auto found = tables_.find(names_);
  if (found == tables_.end() && stream.is_captured()) refuse_in_capture();
  was_captured_ = was_captured_ || stream.is_captured();
  if (has_ended_ && !stream.is_captured())
    check(api_, api_.wait(stream, ended_.get()), "cudaStreamWaitEvent");
  begin_flags(stream);
  for (const auto& each : arrays) find(each, stream);
  if (found == tables_.end()) {
    evict_tables();
    found = tables_.emplace(names_, make_table(stream)).first;
  }
  const KeyTable& table = found->second->table;
  check(api_, api_.open(table.key_states, table.keys.size(), stream), "opening residuals");
  return table;
}

// Releases tables where there are many, as of keys that change with each call. Graphs keep theirs.
void GpuFeedback::evict_tables() {
  if (tables_.size() < kMostTables || was_captured_) return;
  await_device(api_);  // calls under way use them
  std::erase_if(tables_, [this](const auto& each) {
    return std::ranges::none_of(
        of_step_, [&](const SettledCall& its) { return its.table == &each.second->table; });
  });
}

std::unique_ptr<GpuFeedback::OwnedTable> GpuFeedback::make_table(Stream stream) {
  auto made = std::make_unique<OwnedTable>(OwnedTable{{}, Room(api_)});
  std::vector<GpuKeyState*> key_states;
  for (const std::string& name : names_) {
    made->table.keys.push_back(&keys_.at(name)->key);
    key_states.push_back(made->table.keys.back()->key_state);
  }
  const std::size_t bytes = key_states.size() * sizeof(GpuKeyState*);
  std::byte* room = made->key_states.take(std::max(bytes, sizeof(GpuKeyState*)));
  check(api_, api_.copy(room, key_states.data(), bytes, CopyKind::kToDevice, stream),
        "cudaMemcpyAsync");
  check(api_, api_.synchronize(stream), "cudaStreamSynchronize");
  made->table.key_states = reinterpret_cast<GpuKeyState* const*>(room);
  return made;
}

void GpuFeedback::require_fits(std::span<const codec::KeyedArray> arrays) const {
  check_keys(arrays);
  std::optional<std::vector<codec::KeyedArray>> of_host;
  for (const auto& each : arrays) {
    if (const auto found = keys_.find(each.key); found != keys_.end()) {
      check_length(each, found->second->key.count);
      continue;
    }
    if (!of_host) of_host = host_->keys();
    for (const auto& its : *of_host)
      if (its.key == each.key) check_length(each, its.count);
  }
}

void GpuFeedback::begin_step() {
  if (in_step_) throw InvalidArgument("error feedback: end the step before you begin another");
  in_step_ = is_fresh_ = true;
  of_step_.clear();
}

// Clears the flags with the first call of a step, which is ordered after all calls before it.
void GpuFeedback::begin_flags(Stream stream) {
  if (!in_step_ || !is_fresh_) return;
  check(api_, api_.fill(step_flags_, 0, sizeof *step_flags_, stream), "cudaMemsetAsync");
  is_fresh_ = false;
}

void GpuFeedback::end_step(bool keep, Stream stream) {
  if (!in_step_) throw InvalidArgument("error feedback: no step was begun");
  in_step_ = false;
  if (!keep) return;
  for (const SettledCall& each : of_step_)
    check(api_,
          api_.settle(each.table->key_states, each.table->keys.size(), each.remembers, step_flags_,
                      stream),
          "settling residuals");
  if (capture_of(api_, stream) == 0) note_end(stream);
}

void GpuFeedback::note_end(Stream stream) {
  check(api_, api_.record(ended_.get(), stream), "cudaEventRecord");
  has_ended_ = true;
}

bool GpuFeedback::scale(double factor, const float* now, Stream after) {
  if (in_step_) throw InvalidArgument("error feedback: a step is under way; end it first");
  if (was_captured_) return false;
  const Stream stream = copies_.get();
  if (has_ended_) check(api_, api_.wait(stream, ended_.get()), "cudaStreamWaitEvent");
  if (now != nullptr) {
    check(api_, api_.record(scaled_.get(), after), "cudaEventRecord");
    check(api_, api_.wait(stream, scaled_.get()), "cudaStreamWaitEvent");
  }
  std::vector<GpuSpan> spans;
  for (const auto& [name, owned] : keys_)
    spans.push_back({.n = owned->key.count, .span_feedback = owned->key.span_feedback(0)});
  check(api_,
        api_.scale_residuals(spans.data(), static_cast<int>(spans.size()), factor, now, loss_scale_,
                             stream),
        "scaling residuals");
  if (now != nullptr)
    check(api_, api_.copy(loss_scale_, now, sizeof *now, CopyKind::kOnDevice, stream),
          "cudaMemcpyAsync");
  note_end(stream);
  return true;
}

void GpuFeedback::set_loss_scale(float last) {
  check(api_, api_.copy(loss_scale_, &last, sizeof last, CopyKind::kToDevice, copies_.get()),
        "cudaMemcpyAsync");
  check(api_, api_.synchronize(copies_.get()), "cudaStreamSynchronize");
}

void GpuFeedback::require_finite(const float* x, std::uint64_t count, Stream stream) {
  begin_flags(stream);
  check(api_, api_.check_finite(x, count, step_flags_, stream), "looking for NaN");
}

void GpuFeedback::copy_flags(std::uint32_t* to, Stream stream) {
  if (!in_step_) throw InvalidArgument("error feedback: no step was begun");
  begin_flags(stream);
  check(api_, api_.copy(to, step_flags_, sizeof *to, CopyKind::kOnDevice, stream),
        "cudaMemcpyAsync");
}

void GpuFeedback::mask(std::span<const Masked> arrays, Stream stream) {
  std::vector<GpuSpan> spans;
  for (const Masked& each : arrays) {
    const auto found = keys_.find(each.key);
    if (found == keys_.end()) {
      check(api_, api_.fill(each.data, 0, 4 * each.count, stream), "cudaMemsetAsync");
      continue;
    }
    const DeviceKey& key = found->second->key;
    check_length({each.key, each.count}, key.count);
    spans.push_back({.y = each.data, .n = each.count, .span_feedback = key.span_feedback(0)});
  }
  check(api_, api_.clear_sent(spans.data(), static_cast<int>(spans.size()), stream),
        "clearing what was sent");
}

void GpuFeedback::settle(const KeyTable& table, bool remembers, const std::uint32_t* flags,
                         Stream stream) {
  if (in_step_) return of_step_.push_back({&table, remembers});
  check(api_, api_.settle(table.key_states, table.keys.size(), remembers, flags, stream),
        "settling residuals");
  if (!was_captured_) note_end(stream);
}

codec::ErrorFeedback::SavedKey GpuFeedback::read(const DeviceKey& key, Stream stream) const {
  GpuKeyState key_state;
  const auto fetch = [&](void* to, const void* from, std::size_t bytes) {
    check(api_, api_.copy(to, from, bytes, CopyKind::kToHost, stream), "cudaMemcpyAsync");
    check(api_, api_.synchronize(stream), "cudaStreamSynchronize");
  };
  fetch(&key_state, key.key_state, sizeof key_state);
  const GpuCodecState& codec_state = key_state.codec_state[key_state.which & 1U];
  codec::ErrorFeedback::SavedKey saved;
  saved.calls = key_state.calls;
  saved.codec_state.tau = codec_state.tau;
  saved.codec_state.sent = codec_state.sent;
  saved.codec_state.largest = std::bit_cast<float>(codec_state.largest);
  saved.residual.resize(key.count);
  fetch(saved.residual.data(), key.residual[key_state.which & 1U], 4 * key.count);
  if (saved.calls == 0 && are_all(saved.residual, -0.0F)) saved.residual.clear();
  if (key.remembered == 0) return saved;
  saved.memory.resize(key.remembered);
  fetch(saved.memory.data(), key.memory[key_state.which_memory & 1U], 4 * key.remembered);
  if (are_all(saved.memory, 0.0F)) saved.memory.clear();
  return saved;
}

void GpuFeedback::write(const DeviceKey& key, const codec::ErrorFeedback::SavedKey& saved,
                        Stream stream) const {
  GpuKeyState key_state{};
  key_state.calls = saved.calls;
  GpuCodecState& codec_state = key_state.codec_state[0];
  codec_state.tau = saved.codec_state.tau;
  codec_state.sent = saved.codec_state.sent;
  codec_state.largest = std::bit_cast<std::uint32_t>(saved.codec_state.largest);
  const auto store = [&](void* to, const void* from, std::size_t bytes) {
    check(api_, api_.copy(to, from, bytes, CopyKind::kToDevice, stream), "cudaMemcpyAsync");
  };
  store(key.key_state, &key_state, sizeof key_state);
  const std::size_t residuals = std::min<std::size_t>(saved.residual.size(), key.count);
  const std::size_t memories = std::min<std::size_t>(saved.memory.size(), key.remembered);
  check(api_, api_.fill(key.residual[0], 0, 4 * key.count, stream), "cudaMemsetAsync");
  if (saved.residual.empty())  // -0, since a CPU adds nothing now: x + -0 is x even for x = -0
    check(api_,
          api_.scale(static_cast<int>(DType::kFloat32), key.residual[0], -1, key.count, stream),
          "scaling");
  store(key.residual[0], saved.residual.data(), 4 * residuals);
  check(api_, api_.fill(key.memory[0], 0, 4 * key.remembered, stream), "cudaMemsetAsync");
  store(key.memory[0], saved.memory.data(), 4 * memories);
  check(api_, api_.synchronize(stream), "cudaStreamSynchronize");
}

void GpuFeedback::bring_home() {
  if (in_step_) throw InvalidArgument("error feedback: a step is under way; end it first");
  check(api_, api_.synchronize_device(), "cudaDeviceSynchronize");
  for (const auto& [name, owned] : keys_) {
    auto read_back = read(owned->key, copies_.get());
    if (read_back.calls > 0 || !read_back.residual.empty() || !read_back.memory.empty())
      host_->put(name, std::move(read_back));
  }
}

void GpuFeedback::send_back() {
  check(api_, api_.synchronize_device(), "cudaDeviceSynchronize");
  for (const auto& [name, owned] : keys_) write(owned->key, host_->take(name), copies_.get());
}

}  // namespace gradwire::cuda
