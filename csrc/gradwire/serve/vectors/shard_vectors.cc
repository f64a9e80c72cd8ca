// What a shard does with staged pushes and with commands to its vectors.
#include <algorithm>
#include <cstring>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/serve/shard/shard.h"

namespace gradwire::serve {
namespace {

// Takes a staged push's name off the payload of its first frame.
ConstBytes take_name(ConstBytes payload, StagedPush& name) {
  if (payload.size() < sizeof name) throw InvalidArgument("push: it has no name to be staged by");
  std::memcpy(&name, payload.data(), sizeof name);
  return payload.subspan(sizeof name);
}

}  // namespace

// Takes one frame of a push that is staged. NaN is a value like others: the coordinator sees it in
// sums.
std::optional<Answer> Shard::stage(OpenRequest& push, const ServeMessage& message) {
  const ShardFrame& frame = take_frame(push, message);
  ConstBytes payload = message.payload;
  if (push.next == 1) {
    payload = take_name(payload, push.name);
    begin_staging(push);
  }
  if (push.arrival)
    decode_frame(codecs_, message.header.codec, layout_, frame, payload, /*add=*/false,
                 push.staged.data() + frame.first * layout_.words());
  if (!message.header.has(kLast)) return std::nullopt;
  push.next = 0;
  if (push.answer.refused == Refusal::kNone) end_staging(push);
  return std::exchange(push.answer, {});
}

// Makes room for a push. One that is staged already gets none, and its frames change nothing.
void Shard::begin_staging(OpenRequest& push) {
  push.answer = {};
  push.staged = {};
  push.arrival.reset();
  if (!has_values()) {
    push.answer = {Refusal::kNoValues, kNoValues};
    return;
  }
  try {
    push.arrival = vectors_->arrive(push.name);
    if (push.arrival) push.staged.resize(layout_.elements() * layout_.words());
  } catch (const InvalidArgument& error) {
    push.answer = {Refusal::kInvalid, error.what()};
  }
}

void Shard::end_staging(OpenRequest& push) {
  const bool kept = push.arrival.has_value();
  push.arrival.reset();  // whose room it takes
  if (kept) vectors_->stage(push.name, std::exchange(push.staged, {}));
  ++statistics_.pushes;
}

std::vector<std::byte> Shard::ask(ConstBytes commands, bool may_change) {
  if (!vectors_)
    throw InvalidArgument("the shards hold no vectors: connect with the rule 'staged'");
  const std::vector<Command> parsed = parse_commands(commands);
  if (!may_change && std::ranges::any_of(parsed, changes_vectors))
    throw InvalidArgument("only a coordinator may change vectors");
  const SharedWords before = vectors_->find(kParameters);
  const std::vector<CommandResult> results = vectors_->run(parsed);
  if (vectors_->find(kParameters) != before) ++version_;
  return pack(results);
}

}  // namespace gradwire::serve
