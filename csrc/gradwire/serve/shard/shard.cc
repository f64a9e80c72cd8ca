#include "gradwire/serve/shard/shard.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/serve/shard/memory.h"
#include "gradwire/serve/vectors/block_sums.h"

namespace gradwire::serve {
namespace {

float* at(Snapshot::StateArray& slot, std::size_t first) { return slot.values.data() + first; }

}  // namespace

bool pulls_differences(const codec::Codec& codec) {
  using Kind = codec::Definition::Kind;
  const Kind kind = codec.definition().kind;
  return kind != Kind::kNone && kind != Kind::kFp16 && kind != Kind::kBf16 &&
         kind != Kind::kLossless;
}

Shard::Shard(ParameterTable table, std::uint32_t shard, std::uint64_t memory)
    : table_(std::move(table)),
      mark_(table_.mark()),
      index_(shard),
      codecs_(codecs_of(table_)),
      layout_(table_, codecs_, shard),
      rule_(make_rule(table_.rule)),
      memory_(memory),
      steps_(layout_.frames().size()),
      scratch_(kMostFrame) {
  if (table_.staged()) {
    const std::size_t block = block_of(table_.elements());
    const VectorLimits limits{.bytes = memory / 2};
    vectors_ = std::make_unique<Vectors>(layout_.elements(), layout_.words(), block, limits);
    return;
  }
  arrays_.push_back({"w", make_words(layout_.elements())});
  for (const RuleState& state : rule_.states)
    arrays_.push_back({std::string(state.name), make_words(layout_.elements(), state.initial)});
  update_.resize(arrays_.size(), std::vector<float>(kMostFrame));
  if (rule_.rounds) rounds_.emplace(*rule_.rounds);
}

Shard::Shard(Snapshot snapshot, std::uint64_t memory)
    : Shard(ParameterTable::parse(snapshot.table), snapshot.shard, memory) {
  bool fits = snapshot.steps.size() == steps_.size();
  if (vectors_) {
    for (Snapshot::StateArray& each : snapshot.arrays)
      vectors_->put(each.name, std::move(each.values));
    fits = fits && vectors_->find(kParameters) != nullptr;
  } else {
    fits = fits && snapshot.arrays.size() == arrays_.size();
  }
  for (std::size_t i = 0; fits && i < arrays_.size(); ++i)
    fits = snapshot.arrays[i].name == arrays_[i].name &&
           snapshot.arrays[i].values.size() == arrays_[i].values.size();
  if (!fits) throw InvalidArgument("the snapshot's slots are not those of its table and shard");
  for (std::size_t i = 0; i < arrays_.size(); ++i)  // in vectors NaN is a value like others
    if (const auto& values = snapshot.arrays[i].values;
        !codec::kernels().finite(values.data(), values.size()))
      throw InvalidArgument("the snapshot's slot '" + snapshot.arrays[i].name +
                            "' holds NaN or infinite values: go on from an older one, or remove "
                            "it, and clients begin anew");
  version_ = first_version_ = snapshot.version;
  for (std::size_t i = 0; i < arrays_.size(); ++i)
    std::ranges::copy(snapshot.arrays[i].values, arrays_[i].values.begin());
  for (Snapshot::StateArray& each : arrays_)  // weights of an open round are not in snapshots
    if (rounds_ && each.name == kRoundSum) std::ranges::fill(each.values, 0.0F);
  steps_ = std::move(snapshot.steps);
}

// Returns the frame that a message holds, which must be the request's next.
const ShardFrame& Shard::take_frame(OpenRequest& request, const ServeMessage& message) const {
  const MessageHeader& header = message.header;
  if (header.has(kFirst)) request.next = 0;
  const bool begun = request.next > 0 ? request.sequence == header.sequence : header.has(kFirst);
  const bool mixed = header.op == Op::kPush && header.codec == kMixedCodecs;
  if (!begun || (header.codec >= codecs_.size() && !mixed) ||
      !layout_.is_described(request.next, header))
    throw InvalidArgument(str_cat(
        name_of(header.op), ": a frame is out of order, or has other elements than the next one"));
  request.sequence = header.sequence;
  return layout_.frames()[request.next++];
}

std::optional<Answer> Shard::set(ClientId client, const ServeMessage& message) {
  OpenRequest& set = clients_[client].set;
  const ShardFrame& frame = take_frame(set, message);
  if (set.next == 1) set.answer = {};
  if (has_values()) {
    set.answer = {Refusal::kHasValues, "there are values already"};
  } else if (set.answer.refused != Refusal::kInvalid && make_room(set)) {
    const bool finite = decode_frame(codecs_, 0, layout_, frame, message.payload, /*add=*/false,
                                     set.staged.data() + frame.first * layout_.words());
    if (!finite) set.answer = {Refusal::kNotFinite, "the initial values hold NaN or Inf"};
  }
  if (!message.header.has(kLast)) return std::nullopt;
  if (set.answer.refused == Refusal::kNone) {
    if (vectors_)
      vectors_->put(std::string(kParameters), std::move(set.staged));
    else
      arrays_.front().values.swap(set.staged);
    version_ = 0;
  }
  set.staged = {};
  return std::exchange(set.answer, {});
}

std::uint64_t Shard::staleness(const OpenRequest& push) const noexcept {
  return version_ - (push.version == kNoVersion ? 0 : std::min(push.version, version_));
}

void Shard::refuse_if_stale(OpenRequest& push) {
  if (staleness(push) <= table_.max_staleness) return;
  push.answer = {Refusal::kStale, "its staleness of " + std::to_string(staleness(push)) +
                                      " versions is above max_staleness " +
                                      std::to_string(table_.max_staleness)};
  ++statistics_.stale;
}

void Shard::begin_push(OpenRequest& push, const MessageHeader& header) {
  push.version = header.version;
  // A version above the shard's is from before a restart that lost it: it counts as the snapshot's.
  if (push.version != kNoVersion && push.version > version_) push.version = first_version_;
  push.rate = header.extra == 0 ? rule_.rate : std::bit_cast<float>(header.extra);
  push.answer = {};
  if (!std::isfinite(push.rate) || push.rate < 0)
    throw InvalidArgument("push: the rate is negative, or not finite");
  if (!has_values())
    push.answer = {Refusal::kNoValues, kNoValues};
  else if (rounds_ && !(push.rate >= kLeastWeight && push.rate <= kMostWeight))
    push.answer = {Refusal::kInvalid, str_cat("its weight is not from ", kLeastWeight, " to ",
                                              kMostWeight, ", as those of a round are")};
  else
    refuse_if_stale(push);
}

std::optional<Answer> Shard::push(ClientId client, const ServeMessage& message) {
  OpenRequest& push = clients_[client].push;
  if (vectors_) return stage(push, message);
  if (message.header.has(kFirst)) abandon(push);
  const ShardFrame& frame = take_frame(push, message);
  if (push.next == 1) begin_push(push, message.header);
  if (push.answer.refused == Refusal::kNone) take_push(client, push, frame, message);
  if (!message.header.has(kLast)) return std::nullopt;
  return end_push(client, push);
}

// Decodes a frame. A push of one frame is applied at once, and a plain payload read in place. One
// of several frames is staged, since its last frame may be refused.
void Shard::take_push(ClientId client, OpenRequest& push, const ShardFrame& frame,
                      const ServeMessage& message) {
  const std::uint16_t codec = message.header.codec;
  const bool whole = layout_.frames().size() == 1;
  const float* gradient = scratch_.data();
  bool finite = false;
  if (!whole) {
    if (!make_room(push)) return;
    finite = decode_frame(codecs_, codec, layout_, frame, message.payload, /*add=*/false,
                          push.staged.data() + frame.first);
  } else if (codec == 0 && message.payload.size() == frame.count * sizeof(float)) {
    gradient = reinterpret_cast<const float*>(message.payload.data());
    finite = codec::kernels().finite(gradient, frame.count);
  } else {
    finite = decode_frame(codecs_, codec, layout_, frame, message.payload, /*add=*/false,
                          scratch_.data());
  }
  if (!finite)
    refuse_not_finite(push, "it holds NaN or Inf");
  else if (whole && update(push, 0, gradient))
    apply(client, push, 0, gradient);
}

void Shard::refuse_not_finite(OpenRequest& push, const char* why) {
  push.answer = {Refusal::kNotFinite, why};
  ++statistics_.not_finite;
}

// Makes room for the whole of a request; refuses it where there is none. Returns whether there is.
bool Shard::make_room(OpenRequest& request) {
  if (request.staged.empty()) request.staged = std::exchange(spare_, {});
  if (!request.staged.empty()) return true;
  const std::size_t words = layout_.elements() * layout_.words();
  if (const std::string why = why_no_room_for(words); !why.empty()) {
    request.answer = {Refusal::kInvalid, why};
    return false;
  }
  request.staged = make_words(words);
  return true;
}

// Returns why so many words more must not be kept for clients; empty where they may.
std::string Shard::why_no_room_for(std::size_t words) {
  std::uint64_t held = words;
  for (const Snapshot::StateArray& each : arrays_) held += each.values.size();
  for (const auto& [client, each] : clients_)
    held += each.set.staged.size() + each.push.staged.size() + each.shadow.size();
  std::erase_if(copies_of_values_, [](const auto& each) { return each.expired(); });
  held += copies_of_values_.size() * layout_.elements();
  if ((held + spare_.size()) * sizeof(float) > memory_) spare_ = {};
  if (held * sizeof(float) <= memory_) return {};
  return str_cat("shard ", index_, " keeps a copy of its part for each such client, ",
                 gibibytes(held * sizeof(float)), " with this one, and its server may use ",
                 gibibytes(memory_), ": start more shards, on more hosts, or fewer clients");
}

float Shard::rate_of(const OpenRequest& push) const noexcept {
  if (!table_.divide) return push.rate;
  return push.rate / static_cast<float>(std::max<std::uint64_t>(staleness(push), 1));
}

bool Shard::compute(std::size_t index, const Change& change) {
  const ShardFrame& frame = layout_.frames()[index];
  for (std::size_t i = 0; i < arrays_.size(); ++i)
    std::copy_n(at(arrays_[i], frame.first), frame.count, update_[i].data());
  std::array<float*, 2> states{};
  for (std::size_t i = 1; i < arrays_.size(); ++i) states[i - 1] = update_[i].data();
  change(update_[0].data(), states, frame.count);
  return std::ranges::all_of(
      update_, [&](const auto& each) { return codec::kernels().finite(each.data(), frame.count); });
}

void Shard::put(std::size_t index) {
  keep(index);
  const ShardFrame& frame = layout_.frames()[index];
  for (std::size_t i = 0; i < arrays_.size(); ++i)
    std::copy_n(update_[i].data(), frame.count, at(arrays_[i], frame.first));
}

// Computes the parameters and the rule's state after a frame of a push. Refuses the push where
// these are not finite. Returns whether they are.
bool Shard::update(OpenRequest& push, std::size_t index, const float* gradient) {
  const bool finite = compute(index, [&](float* w, std::span<float* const> states, std::size_t n) {
    rule_.apply(w, states, gradient, rate_of(push), steps_[index] + 1, n);
  });
  if (!finite)
    refuse_not_finite(push, "the parameters would hold NaN or Inf: its gradient is too large");
  return finite;
}

// Applies the frame that update() has just computed.
void Shard::apply(ClientId client, OpenRequest& push, std::size_t index, const float* gradient) {
  const ShardFrame& frame = layout_.frames()[index];
  if (log_) log_({client, push.sequence, index, rate_of(push), {gradient, frame.count}});
  put(index);
  ++steps_[index];
  push.applied = true;
}

// Applies all of a staged push, or refuses it.
void Shard::apply_staged(ClientId client, OpenRequest& push) {
  const auto gradient = [&](std::size_t i) {
    return push.staged.data() + layout_.frames()[i].first;
  };
  const std::size_t frames = layout_.frames().size();
  for (std::size_t i = 0; i < frames; ++i)
    if (!update(push, i, gradient(i))) return;
  for (std::size_t i = 0; i < frames; ++i) {
    update(push, i, gradient(i));
    apply(client, push, i, gradient(i));
  }
}

Answer Shard::end_push(ClientId client, OpenRequest& push) {
  const std::uint64_t stale = has_values() ? staleness(push) : 0;
  // Others' pushes may have come since its first frame.
  if (!push.applied && push.answer.refused == Refusal::kNone) refuse_if_stale(push);
  if (!push.applied && push.answer.refused == Refusal::kNone) apply_staged(client, push);
  drop_staged(push);
  push.next = 0;
  if (std::exchange(push.applied, false)) {
    if (rounds_)
      rounds_->push(client, rate_of(push), stale > 0);
    else
      ++version_;
    ++statistics_.pushes;
    statistics_.count_staleness(stale);
  }
  Answer answer = std::exchange(push.answer, {});
  answer.staleness = static_cast<std::uint32_t>(std::min<std::uint64_t>(stale, ~std::uint32_t{0}));
  return answer;
}

// Drops an incomplete push.
void Shard::abandon(OpenRequest& push) {
  if (std::exchange(push.next, 0) == 0) return;
  drop_staged(push);
  ++statistics_.partial;
}

// Keeps the memory of the push for the next one.
void Shard::drop_staged(OpenRequest& push) {
  if (!push.staged.empty()) spare_ = std::exchange(push.staged, {});
}

Shard::Pull Shard::begin_pull(ClientId client, const MessageHeader& request) {
  if (request.codec >= codecs_.size()) throw InvalidArgument("pull: there is no such codec");
  ++statistics_.pulls;
  Pull pull{.sequence = request.sequence, .codec = request.codec, .version = version_};
  if (table_.atomic_push || vectors_) pull.frozen = frozen();
  if (!pulls_differences(*codecs_[request.codec])) return pull;
  std::vector<float>& shadow = clients_[client].shadow;
  pull.dense = request.extra == 0;
  if (!pull.dense && shadow.empty())
    throw InvalidArgument("pull: the shard does not know what the client has");
  if (pull.dense && shadow.empty()) {
    if (const std::string why = why_no_room_for(layout_.elements()); !why.empty())
      throw NoRoom(why);
    shadow.resize(layout_.elements());
  }
  return pull;
}

// With atomic pushes, pulls read a copy, one for all pulls of a version. Vectors are never changed
// in place.
SharedWords Shard::frozen() {
  if (vectors_) return vectors_->find(kParameters);
  auto copy = frozen_version_ == version_ ? frozen_.lock() : nullptr;
  if (!copy) {
    if (const std::string why = why_no_room_for(layout_.elements()); !why.empty())
      throw NoRoom(why);
    copy = std::make_shared<const Words>(values());
    copies_of_values_.push_back(copy);
  }
  frozen_ = copy;
  frozen_version_ = version_;
  return copy;
}

bool Shard::pull_frame(ClientId client, Pull& pull, MessageHeader& header, Bytes out, Copy copy) {
  const ShardFrame& frame = layout_.frames()[pull.next];
  const bool last = pull.next + 1 == layout_.frames().size();
  const float* w = (pull.frozen ? *pull.frozen : values()).data() + frame.first * layout_.words();
  header.op = Op::kPull;
  header.flags = kReply;
  layout_.describe(pull.next, header);
  header.codec = pull.dense ? 0 : pull.codec;
  header.client = client;
  header.sequence = pull.sequence;
  header.version = pull.frozen ? pull.version : version_;
  const codec::Codec& codec = *codecs_[header.codec];
  std::size_t bytes = 0;
  if (pulls_differences(codec)) {
    bytes = encode_difference(header.codec, frame, w, clients_[client].shadow.data() + frame.first,
                              out);
  } else {
    bytes = encode(codec, frame, w, out, copy);
    if (pull.dense) std::copy_n(w, frame.count, clients_[client].shadow.data() + frame.first);
  }
  header.length = static_cast<std::uint32_t>(bytes);
  ++pull.next;
  return last;
}

std::size_t Shard::encode(const codec::Codec& codec, const ShardFrame& frame, const float* x,
                          Bytes out, Copy copy) const {
  if (codec.definition().kind == codec::Definition::Kind::kNone) {
    const std::size_t plain = frame.count * layout_.words() * sizeof(float);
    copy(out.data(), reinterpret_cast<const std::byte*>(x), plain);
    return plain;
  }
  std::size_t bytes = 0;
  for (const ParameterSpan& span : layout_.spans(frame))
    bytes += codec.encode(x + (span.first - frame.first), span.count, {}, out.subspan(bytes));
  return bytes;
}

// The shadow takes what the client will decode, so what the codec loses is in the next difference.
std::size_t Shard::encode_difference(std::uint16_t codec, const ShardFrame& frame, const float* w,
                                     float* shadow, Bytes out) {
  for (std::size_t i = 0; i < frame.count; ++i) scratch_[i] = w[i] - shadow[i];
  const std::size_t bytes = encode(*codecs_[codec], frame, scratch_.data(), out, copy_cached);
  decode_frame(codecs_, codec, layout_, frame, ConstBytes(out).first(bytes), /*add=*/true, shadow);
  return bytes;
}

void Shard::join(ClientId client) {
  if (rounds_) rounds_->join(client);
}

std::string Shard::end_round_if_over() {
  if (!rounds_ || !rounds_->over()) return {};
  std::string line;
  if (!rounds_->has_quorum())
    line = str_cat("round ", version_ + 1, " ended without a quorum of ", rule_.rounds->quorum,
                   " replicas, ", rule_.rounds->patience, " s after its first push");
  const std::size_t frames = layout_.frames().size();
  const Change end = [&](float* w, std::span<float* const> states, std::size_t n) {
    rule_.end_round(w, states, rounds_->weight(), n);
  };
  bool finite = true;
  for (std::size_t i = 0; finite && i < frames; ++i) finite = compute(i, end);
  if (!finite) ++statistics_.not_finite;
  const Change drop = [](float*, std::span<float* const> states, std::size_t n) {
    std::fill_n(states[1], n, 0.0F);
  };
  for (std::size_t i = 0; i < frames; ++i) {
    compute(i, finite ? end : drop);
    put(i);
  }
  rounds_->next();
  ++version_;
  return line;
}

void Shard::leave(ClientId client) {
  if (rounds_) rounds_->leave(client);
  const auto found = clients_.find(client);
  if (found == clients_.end()) return;
  abandon(found->second.push);
  clients_.erase(found);
}

Snapshot Shard::outline() const {
  Snapshot outline{table_.text(), index_, version_, steps_, {}};
  for (const Snapshot::StateArray& each : arrays_) outline.arrays.push_back({each.name, {}});
  return outline;
}

void Shard::begin_snapshot(std::shared_ptr<Snapshot> to, std::function<void()> done) {
  to->version = version_;
  to->steps = steps_;
  copies_.emplace_back(std::move(to), std::move(done));
}

void Shard::keep(std::size_t frame) {
  for (SnapshotCopy& each : copies_) each.keep(layout_.frames(), arrays_, frame);
}

bool Shard::copy_block() {
  if (copies_.empty()) return false;
  if (copies_.front().copy_block(layout_.frames(), arrays_)) copies_.erase(copies_.begin());
  return true;
}

}  // namespace gradwire::serve
