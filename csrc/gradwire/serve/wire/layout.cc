#include "gradwire/serve/wire/layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gradwire/base/error.h"
#include "gradwire/base/partition.h"
#include "gradwire/serve/vectors/block_sums.h"
#include "gradwire/serve/vectors/commands.h"
#include "gradwire/serve/wire/message.h"

namespace gradwire::serve {
namespace {

// Returns where a shard begins: at a multiple of a cache line of elements, unless shards are small;
// at a block where they hold vectors.
std::uint64_t begin_of(const ParameterTable& table, std::uint32_t shard) {
  constexpr std::uint64_t kLine = 16;
  const std::uint64_t elements = table.elements();
  if (shard == table.shards) return elements;
  if (table.staged()) {
    const std::uint64_t block = block_of(elements);
    return even_part((elements + block - 1) / block, shard, table.shards) * block;
  }
  const std::uint64_t begin = even_part(elements, shard, table.shards);
  return elements / table.shards >= 4 * kLine ? begin / kLine * kLine : begin;
}

// Copies a frame's payload of float64. Returns whether all values are finite.
bool copy_doubles(const ShardFrame& frame, ConstBytes payload, float* y) {
  if (payload.size() != frame.count * sizeof(double))
    throw InvalidArgument(
        str_cat("a frame's payload has ", payload.size(), " bytes for ", frame.count, " elements"));
  std::memcpy(y, payload.data(), payload.size());
  bool finite = true;
  for (std::size_t i = 0; i < frame.count; ++i) {
    double value = 0;
    std::memcpy(&value, y + 2 * i, sizeof value);
    finite = finite && std::isfinite(value);
  }
  return finite;
}

std::size_t most_bytes(const Codecs& codecs, std::size_t count) {
  std::size_t most = 0;
  for (const auto& codec : codecs) most = std::max(most, codec->max_bytes(count));
  return most;
}

}  // namespace

Codecs codecs_of(const ParameterTable& table) {
  Codecs codecs;
  for (const std::string& each : table.codecs) codecs.push_back(codec::make_codec(each));
  return codecs;
}

ShardLayout::ShardLayout(const ParameterTable& table, const Codecs& codecs, std::uint32_t shard)
    : words_(table.words()) {
  if (shard >= table.shards)
    throw InvalidArgument(str_cat("there is no shard ", shard, " of ", table.shards));
  divide(table, begin_of(table, shard), begin_of(table, shard + 1));
  join_into_frames(codecs, table.staged() ? kMostPayload - sizeof(StagedPush) : kMostPayload);
}

// Divides the elements [begin, end) of all parameters into spans of at most a frame.
void ShardLayout::divide(const ParameterTable& table, std::uint64_t begin, std::uint64_t end) {
  std::vector<std::size_t> begins{0};
  for (const Parameter& each : table.parameters) begins.push_back(begins.back() + each.elements());
  for_each_span(begins, begin, end, [this](std::size_t p, std::size_t from, std::size_t to) {
    while (from < to) {
      const std::size_t count = std::min(kMostFrame / words_, to - from);
      spans_.push_back({p, from, elements_, count});
      elements_ += count;
      from += count;
    }
  });
}

// Joins spans into frames, as many as fit whatever the codec.
void ShardLayout::join_into_frames(const Codecs& codecs, std::size_t most) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < spans_.size(); ++i) {
    const ParameterSpan& span = spans_[i];
    // With the byte that names its codec: kMixedCodecs.
    const std::size_t more = 1 + most_bytes(codecs, span.count * words_);
    if (frames_.empty() || frames_.back().count + span.count > kMostFrame / words_ ||
        bytes + more > most) {
      frames_.push_back({span.first, 0, i, 0});
      bytes = 0;
    }
    bytes += more;
    frames_.back().count += span.count;
    ++frames_.back().spans;
  }
}

void ShardLayout::describe(std::size_t index, MessageHeader& header) const {
  const ShardFrame& frame = frames_.at(index);
  header.flags |= flags_of(index, frames_.size());
  header.first = frame.first;
  header.count = static_cast<std::uint32_t>(frame.count);
}

bool ShardLayout::is_described(std::size_t index, const MessageHeader& header) const {
  return index < frames_.size() && header.has(kLast) == (index + 1 == frames_.size()) &&
         header.first == frames_[index].first && header.count == frames_[index].count;
}

bool decode_frame(const Codecs& codecs, std::uint16_t codec, const ShardLayout& layout,
                  const ShardFrame& frame, ConstBytes payload, bool add, float* y) {
  if (layout.words() == 2) return copy_doubles(frame, payload, y);
  const std::size_t listed = codec == kMixedCodecs ? frame.spans : 0;
  if (payload.size() < listed)
    throw InvalidArgument("a frame's payload is shorter than the list of its codecs");
  ConstBytes rest = payload.subspan(listed);
  bool finite = true;
  for (std::size_t i = 0; i < frame.spans; ++i) {
    const ParameterSpan& span = layout.spans(frame)[i];
    const std::size_t index = listed > 0 ? static_cast<std::size_t>(payload[i]) : codec;
    if (index >= codecs.size()) throw InvalidArgument("a frame names a codec that is not there");
    float* const to = y + (span.first - frame.first);
    const codec::Decoded decoded = add ? codecs[index]->decode_add(rest, to, span.count)
                                       : codecs[index]->decode(rest, to, span.count);
    finite = finite && decoded.finite;
    rest = rest.subspan(decoded.bytes);
  }
  if (!rest.empty()) throw InvalidArgument("a frame's payload is longer than its elements");
  return finite;
}

}  // namespace gradwire::serve
