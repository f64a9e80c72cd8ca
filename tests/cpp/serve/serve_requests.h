// Requests to a shard, without a channel.
#pragma once

#include <bit>
#include <limits>
#include <map>

#include "serve_job.h"

namespace gradwire::serve {

// Sends frames to a shard as a client would.
class Direct {
 public:
  explicit Direct(const ParameterTable& table, std::uint32_t index = 0,
                  std::uint64_t memory = usable_memory())
      : shard(table, index, memory), codecs_(codecs_of(table)) {}
  explicit Direct(Shard given) : shard(std::move(given)), codecs_(codecs_of(shard.table())) {}

  // Sends the first `frames` frames of a request; all of them by default.
  std::optional<Answer> send(Op op, ClientId client, const Arrays& x, std::uint16_t codec = 0,
                             std::uint64_t version = 0,
                             std::size_t frames = std::numeric_limits<std::size_t>::max(),
                             codec::ErrorFeedback* feedback = nullptr) {
    const ShardLayout& layout = shard.layout();
    Outgoing outgoing(shard.table(), spans_of<Gradients>(x), codecs_,
                      std::vector(x.size(), static_cast<std::uint8_t>(codec)),
                      std::shared_ptr<codec::ErrorFeedback>(feedback, [](auto*) {}));
    outgoing.open();
    std::vector<std::byte> room(kMostPayload);
    std::optional<Answer> answer;
    ++sequence_;
    frames = std::min(frames, layout.frames().size());
    for (std::size_t i = 0; i < frames; ++i) {
      const ShardFrame& frame = layout.frames()[i];
      MessageHeader header;
      header.op = op;
      header.client = client;
      header.codec = codec;
      header.sequence = sequence_;
      header.version = version;
      header.extra = std::bit_cast<std::uint32_t>(rate);
      header.first = frame.first;
      header.count = static_cast<std::uint32_t>(frame.count);
      header.flags = static_cast<std::uint8_t>((i == 0 ? kFirst : 0) |
                                               (i + 1 == layout.frames().size() ? kLast : 0));
      const std::size_t bytes = outgoing.encode(layout, frame, room, copy_cached);
      const ServeMessage message{header, ConstBytes(room).first(bytes)};
      answer = op == Op::kSet ? shard.set(client, message) : shard.push(client, message);
    }
    if (frames < layout.frames().size())
      for (const ShardFrame& frame : layout.frames()) outgoing.keep(layout, frame);
    outgoing.close();
    return answer;
  }

  // Pulls into what the client has, which it returns.
  const std::vector<float>& pull(ClientId client, std::uint16_t codec) {
    std::vector<float>& has = mirrors_[client];
    MessageHeader request;
    request.codec = codec;
    request.extra = has.empty() ? 0 : 1;
    has.resize(shard.layout().elements());
    Shard::Pull pull = shard.begin_pull(client, request);
    std::vector<std::byte> room(kMostPayload);
    for (bool last = false; !last;) {
      MessageHeader header;
      last = shard.pull_frame(client, pull, header, room, copy_cached);
      const bool add = pulls_differences(*codecs_[header.codec]);
      const ShardFrame frame = shard.layout().frames()[pull.next - 1];
      decode_frame(codecs_, header.codec, shard.layout(), frame,
                   ConstBytes(room).first(header.length), add, has.data() + frame.first);
    }
    return has;
  }

  // Drops all that a client has, on both sides.
  void leave(ClientId client) {
    shard.leave(client);
    mirrors_.erase(client);
  }

  std::uint32_t sequence() const { return sequence_; }  // of the last request

  Shard shard;
  float rate = 0;  // of requests; 0 is the rule's own

 private:
  Codecs codecs_;
  std::uint32_t sequence_ = 0;
  std::map<ClientId, std::vector<float>> mirrors_;
};

inline std::uint64_t bytes_of(const ParameterTable& table) {
  return table.elements() * sizeof(float);
}

}  // namespace gradwire::serve
