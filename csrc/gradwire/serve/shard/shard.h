// Shard: one range of the parameters, the state of their update rule, and what clients have open
// there. It is pure data without sockets: a Server gives it the messages of its clients in the
// order in which they arrive. Callers hold a FloatEnvironment (codec/simd/simd.h).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gradwire/base/copy.h"
#include "gradwire/serve/shard/memory.h"
#include "gradwire/serve/shard/snapshot.h"
#include "gradwire/serve/shard/statistics.h"
#include "gradwire/serve/shard/update_rule.h"
#include "gradwire/serve/vectors/vectors.h"
#include "gradwire/serve/wire/layout.h"
#include "gradwire/serve/wire/message.h"
#include "gradwire/serve/wire/table.h"

namespace gradwire::serve {

using ClientId = std::uint64_t;

// Why a shard refuses requests that need values.
inline constexpr const char* kNoValues = "there are no initial values yet; set() them first";

// The answer to a whole SET or PUSH.
struct Answer {
  Refusal refused = Refusal::kNone;
  std::string why;
  std::uint32_t staleness = 0;
};

// Said of a pull for which there is no memory: it alone is refused.
class NoRoom : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One frame of a push as it is applied, for a log.
struct AppliedFrame {
  ClientId client = 0;
  std::uint32_t sequence = 0;
  std::size_t frame = 0;
  float rate = 0;
  std::span<const float> gradient;
};

class Shard {
 public:
  // A pull under way. The server keeps it while it sends the replies.
  struct Pull {
    std::uint32_t sequence = 0;
    std::uint16_t codec = 0;
    bool dense = false;         // differences, but the client has no values yet
    std::size_t next = 0;       // frame
    SharedWords frozen{};       // with Table::atomic_push or staged()
    std::uint64_t version = 0;  // of frozen
  };

  // `memory`: the bytes that this process may use, half of which vectors and staged pushes may
  // take. What is kept for clients counts: requests that come in, and what they have by pulls.
  Shard(Table table, std::uint32_t shard, std::uint64_t memory = usable_memory());
  // Throws InvalidArgument where the snapshot is not of that form, or holds NaN.
  explicit Shard(Snapshot snapshot, std::uint64_t memory = usable_memory());

  const Table& table() const noexcept { return table_; }
  std::uint16_t mark() const noexcept { return mark_; }  // of the table
  const Layout& layout() const noexcept { return layout_; }
  std::uint64_t version() const noexcept { return version_; }
  bool has_values() const noexcept { return version_ != kNoVersion; }
  const Words& values() const {  // needs them
    return vectors_ ? *vectors_->find(kParameters) : slots_.front().values;
  }

  // Take one frame of a request; return the answer with its last. Throw InvalidArgument for what no
  // client of this table sends.
  std::optional<Answer> set(ClientId client, const Message& message);
  std::optional<Answer> push(ClientId client, const Message& message);

  // Returns null without Table::staged().
  const Vectors* vectors() const noexcept { return vectors_.get(); }
  // Runs Commands of a client that may change vectors or not; returns packed Results. Throws
  // InvalidArgument, and changes nothing, for what cannot be done.
  std::vector<std::byte> ask(ConstBytes commands, bool may_change);

  // Needs values. Throws NoRoom where it needs more memory than there may be.
  Pull begin_pull(ClientId client, const MessageHeader& request);
  // Writes the next frame of a pull to `out`, of kMostPayload bytes, and its header. Returns
  // whether it was the last.
  bool pull_frame(ClientId client, Pull& pull, MessageHeader& header, Bytes out, Copy copy);

  // Returns what a client has by pulled differences; empty before the first of them.
  const std::vector<float>& shadow(ClientId client) { return clients_[client].shadow; }

  // Drops all that a client has here.
  void leave(ClientId client);

  // A snapshot is made in steps: outline() has its names alone; the caller makes room in it for
  // layout().elements() values of each slot, in its own time; begin_snapshot() fixes the version;
  // and copy_block(), again and again, copies the values. `done` is called at the end.
  Snapshot outline() const;
  void begin_snapshot(std::shared_ptr<Snapshot> to, std::function<void()> done);
  // Returns whether a snapshot needed it.
  bool copy_block();
  Statistics& statistics() noexcept { return statistics_; }
  void log_to(std::function<void(const AppliedFrame&)> log) { log_ = std::move(log); }

 private:
  // The frames of a SET or a PUSH so far.
  struct Request {
    std::uint32_t sequence = 0;
    std::size_t next = 0;  // frame
    std::uint64_t version = 0;
    float rate = 0;
    Answer answer;
    bool applied = false;
    Words staged;  // of a SET, of a push of several frames, and with Table::staged()
    // With Table::staged():
    StagedPush name;
    std::optional<Vectors::Arrival> arrival{};  // of what is kept of it
  };
  struct Client {
    Request set, push;
    std::vector<float> shadow;  // what it has by pulled differences
  };

  const ShardFrame& take_frame(Request& request, const Message& message) const;
  void begin_push(Request& push, const MessageHeader& header);
  void refuse_if_stale(Request& push);
  void take_push(ClientId client, Request& push, const ShardFrame& frame, const Message& message);
  Answer end_push(ClientId client, Request& push);
  std::optional<Answer> stage(Request& push, const Message& message);
  void begin_staging(Request& push);
  void end_staging(Request& push);
  void abandon(Request& push);
  void drop_staged(Request& push);
  // Must be called before a frame of slots_ or steps_ changes.
  void keep(std::size_t frame);
  void refuse_not_finite(Request& push, const char* why);
  bool make_room(Request& request);
  std::string why_no_room_for(std::size_t words);
  float rate_of(const Request& push) const noexcept;
  bool update(Request& push, std::size_t frame, const float* gradient);
  void apply(ClientId client, Request& push, std::size_t frame, const float* gradient);
  void apply_staged(ClientId client, Request& push);
  std::uint64_t staleness(const Request& push) const noexcept;
  std::size_t encode(const codec::Codec& codec, const ShardFrame& frame, const float* x, Bytes out,
                     Copy copy) const;
  std::size_t encode_difference(std::uint16_t codec, const ShardFrame& frame, const float* w,
                                float* shadow, Bytes out);
  SharedWords frozen();

  Table table_;
  std::uint16_t mark_;
  std::uint32_t index_;
  Codecs codecs_;
  Layout layout_;
  std::shared_ptr<const UpdateRule> rule_;
  std::uint64_t memory_;  // bytes
  std::uint64_t version_ = kNoVersion;
  std::uint64_t first_version_ = 0;    // with which it began: of a snapshot
  std::vector<Snapshot::Slot> slots_;  // empty with vectors_
  std::unique_ptr<Vectors> vectors_;   // with Table::staged()
  std::vector<std::uint64_t> steps_;
  std::map<ClientId, Client> clients_;
  std::vector<SnapshotCopy> copies_;        // under way
  std::vector<float> scratch_;              // a frame
  std::vector<std::vector<float>> update_;  // a frame of each slot, as the next one will be
  Words spare_;                             // of a staged push; gives way where memory is short
  std::weak_ptr<const Words> frozen_;
  std::vector<std::weak_ptr<const Words>> copies_of_values_;  // frozen(), while pulls have them
  std::uint64_t frozen_version_ = kNoVersion;
  Statistics statistics_;
  std::function<void(const AppliedFrame&)> log_;
};

// Returns whether pulls with this codec are differences to what the client has; others are casts.
bool pulls_differences(const codec::Codec& codec);

}  // namespace gradwire::serve
