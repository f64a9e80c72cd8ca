#include "gradwire/serve/wire/layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gradwire/base/error.h"
#include "gradwire/serve/vectors/block_sums.h"
#include "gradwire/serve/vectors/commands.h"
#include "gradwire/serve/wire/message.h"

namespace gradwire::serve {
namespace {

// Where part `part` of `parts` begins, if they are as equal as can be.
std::uint64_t part_of(std::uint64_t whole, std::uint64_t part, std::uint64_t parts) {
  return whole / parts * part + std::min(part, whole % parts);
}

// Where shard `shard` begins: at a whole cache line of elements, unless shards are small; at a
// block where they hold vectors.
std::uint64_t begin_of(const Table& table, std::uint32_t shard) {
  constexpr std::uint64_t kLine = 16;
  const std::uint64_t elements = table.elements();
  if (shard == table.shards) return elements;
  if (table.staged()) {
    const std::uint64_t block = block_of(elements);
    return part_of((elements + block - 1) / block, shard, table.shards) * block;
  }
  const std::uint64_t begin = part_of(elements, shard, table.shards);
  return elements / table.shards >= 4 * kLine ? begin / kLine * kLine : begin;
}

// Copies a frame's payload of float64. Returns whether all values are finite.
bool copy_doubles(const ShardFrame& frame, ConstBytes payload, float* y) {
  if (payload.size() != frame.count * sizeof(double))
    throw InvalidArgument("a frame's payload has " + std::to_string(payload.size()) +
                          " bytes for " + std::to_string(frame.count) + " elements");
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

Codecs codecs_of(const Table& table) {
  Codecs codecs;
  for (const std::string& each : table.codecs) codecs.push_back(codec::make_codec(each));
  return codecs;
}

Layout::Layout(const Table& table, const Codecs& codecs, std::uint32_t shard)
    : words_(table.words()) {
  if (shard >= table.shards)
    throw InvalidArgument("there is no shard " + std::to_string(shard) + " of " +
                          std::to_string(table.shards));
  cut(table, begin_of(table, shard), begin_of(table, shard + 1));
  group(codecs, table.staged() ? kMostPayload - sizeof(StagedPush) : kMostPayload);
}

// Cuts the elements [begin, end) of all parameters into pieces of at most a frame.
void Layout::cut(const Table& table, std::uint64_t begin, std::uint64_t end) {
  std::uint64_t at = 0;  // where the parameter begins
  for (std::size_t p = 0; p < table.parameters.size() && at < end; ++p) {
    const std::uint64_t after = at + table.parameters[p].elements();
    for (std::uint64_t i = std::max(at, begin); i < std::min(after, end);) {
      const std::uint64_t count =
          std::min<std::uint64_t>(kMostFrame / words_, std::min(after, end) - i);
      pieces_.push_back({p, i - at, elements_, count});
      elements_ += count;
      i += count;
    }
    at = after;
  }
}

// Joins pieces into frames, as many as fit whatever the codec.
void Layout::group(const Codecs& codecs, std::size_t most) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    // And its codec: kMixedCodecs.
    const std::size_t more = 1 + most_bytes(codecs, piece.count * words_);
    if (frames_.empty() || frames_.back().count + piece.count > kMostFrame / words_ ||
        bytes + more > most) {
      frames_.push_back({piece.first, 0, i, 0});
      bytes = 0;
    }
    bytes += more;
    frames_.back().count += piece.count;
    ++frames_.back().pieces;
  }
}

bool decode_frame(const codec::Codec& codec, const Layout& layout, const ShardFrame& frame,
                  ConstBytes payload, bool add, float* y) {
  if (layout.words() == 2) return copy_doubles(frame, payload, y);
  bool finite = true;
  for (const Piece& piece : layout.pieces(frame)) {
    float* const to = y + (piece.first - frame.first);
    const codec::Decoded decoded =
        add ? codec.decode_add(payload, to, piece.count) : codec.decode(payload, to, piece.count);
    finite = finite && decoded.finite;
    payload = payload.subspan(decoded.bytes);
  }
  if (!payload.empty()) throw InvalidArgument("a frame's payload is longer than its elements");
  return finite;
}

bool decode_frame(const Codecs& codecs, std::uint16_t codec, const Layout& layout,
                  const ShardFrame& frame, ConstBytes payload, float* y) {
  if (codec != kMixedCodecs)
    return decode_frame(*codecs.at(codec), layout, frame, payload, /*add=*/false, y);
  if (layout.words() != 1 || payload.size() < frame.pieces)
    throw InvalidArgument("a frame's payload is shorter than the list of its codecs");
  ConstBytes rest = payload.subspan(frame.pieces);
  bool finite = true;
  for (std::size_t i = 0; i < frame.pieces; ++i) {
    const Piece& piece = layout.pieces(frame)[i];
    const auto index = static_cast<std::size_t>(payload[i]);
    if (index >= codecs.size()) throw InvalidArgument("a frame names a codec that is not there");
    const codec::Decoded decoded =
        codecs[index]->decode(rest, y + (piece.first - frame.first), piece.count);
    finite = finite && decoded.finite;
    rest = rest.subspan(decoded.bytes);
  }
  if (!rest.empty()) throw InvalidArgument("a frame's payload is longer than its elements");
  return finite;
}

}  // namespace gradwire::serve
