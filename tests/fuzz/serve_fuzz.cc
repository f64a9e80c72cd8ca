// Frames of clients, as a server reads them from a peer, and tables.
//   input: a byte that says what follows:
//     0: the text of a table
//     1: frames, each a header's 64 bytes, 2 bytes that say how many more there are, and these; the
//        headers' magic, length, client and table are made right
//     2, 3: the same, to a shard of vectors of float32 or float64
//     4: commands to vectors
#include <algorithm>
#include <cstring>
#include <utility>

#include "fuzz.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/serve/shard/shard.h"

namespace gradwire::fuzz {
namespace {

using namespace serve;

void read_table(ConstBytes text) {
  const ParameterTable table = ParameterTable::parse(text_of(text));
  require(ParameterTable::parse(table.text()) == table);
  require(table.elements() >= table.shards);
}

ParameterTable small_table() {
  ParameterTable table;
  table.parameters = {{"a", {100}}, {"b", {3, 11}}, {"c", {}}};
  table.rule = "adagrad";
  table.codecs = {"none", "fp16", "int8", "onebit", "threshold", "topk"};
  return table;
}

ParameterTable staged_table(DType dtype) {
  ParameterTable table = small_table();
  table.rule = kStaged;
  table.dtype = dtype;
  if (dtype == DType::kFloat64) table.codecs = {"none"};
  table.check();
  return table;
}

void read_commands(ConstBytes bytes) {
  const auto commands = parse_commands(bytes);
  require(std::ranges::equal(pack(commands), bytes));
}

// What cannot be done changes nothing, and the client goes on.
void ask(Shard& shard, const ServeMessage& message) {
  const std::uint64_t version = shard.version();
  try {
    const bool may_change = message.header.extra != 0;
    const auto results = shard.ask(message.payload, may_change);
    require(results.size() <= kMostPayload);
    parse_results(results);
    require(may_change || shard.version() == version);
  } catch (const InvalidArgument&) {
    require(shard.version() == version);
  }
}

// In memory of its very own size, so that one byte too far is seen.
void take_frame(Shard& shard, Input& input) {
  MessageHeader header;
  const ConstBytes bytes = input.take(sizeof header);
  std::memcpy(&header, bytes.data(), bytes.size());
  const ConstBytes payload = input.take(input.number<std::uint16_t>());
  header.magic = kMessageMagic;
  header.length = static_cast<std::uint32_t>(payload.size());
  std::vector<std::byte> frame(sizeof header + payload.size());
  std::memcpy(frame.data(), &header, sizeof header);
  if (!payload.empty()) std::memcpy(frame.data() + sizeof header, payload.data(), payload.size());
  const ServeMessage message = parse(frame);
  if (message.header.op == Op::kSet) shard.set(1, message);
  if (message.header.op == Op::kPush) shard.push(1, message);
  if (message.header.op == Op::kAsk) ask(shard, message);
  if (message.header.op != Op::kPull || !shard.has_values()) return;
  Shard::Pull pull = shard.begin_pull(1, message.header);
  std::vector<std::byte> room(kMostPayload);
  while (!shard.pull_frame(1, pull, header, room, copy_cached)) continue;
}

void read_frames(Input& input, ParameterTable table) {
  Shard shard(std::move(table), 0);
  while (!input.empty()) take_frame(shard, input);
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  const gradwire::codec::FloatEnvironment environment;
  Input input(data, size);
  try {
    const auto what = input.number<std::uint8_t>();
    if (what == 0)
      read_table(input.rest());
    else if (what == 4)
      read_commands(input.rest());
    else
      read_frames(input, what == 2   ? staged_table(gradwire::DType::kFloat32)
                         : what == 3 ? staged_table(gradwire::DType::kFloat64)
                                     : small_table());
  } catch (const gradwire::InvalidArgument&) {
  }
  return 0;
}
