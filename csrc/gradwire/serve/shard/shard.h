// Shard: consecutive elements of the parameters, the state of their update rule, and the clients'
// incomplete requests. It has no sockets: a Server passes it the clients' messages, in the order of
// their arrival. Callers hold a FloatEnvironment (codec/simd/simd.h).
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
#include "gradwire/serve/shard/rounds.h"
#include "gradwire/serve/shard/snapshot.h"
#include "gradwire/serve/shard/statistics.h"
#include "gradwire/serve/shard/update_rule.h"
#include "gradwire/serve/vectors/vectors.h"
#include "gradwire/serve/wire/layout.h"
#include "gradwire/serve/wire/message.h"
#include "gradwire/serve/wire/table.h"

namespace gradwire::serve {

// The refusal of requests that need values.
inline constexpr const char* kNoValues = "there are no initial values yet; set() them first";

// The answer to a whole SET or PUSH.
struct Answer {
  Refusal refused = Refusal::kNone;
  std::string why;
  std::uint32_t staleness = 0;
};

// Thrown for a pull for which there is no memory: only that pull is refused.
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
  // A pull under way. The Server keeps it while it sends the replies.
  struct Pull {
    std::uint32_t sequence = 0;
    std::uint16_t codec = 0;
    bool dense = false;         // a pull of differences by a client that has no values yet
    std::size_t next = 0;       // frame
    SharedWords frozen{};       // the values, with ParameterTable::atomic_push or staged()
    std::uint64_t version = 0;  // of frozen
  };

  // `memory`: the bytes that this process may use for values, state, incomplete requests and copies
  // of what clients have; half of it for vectors and staged pushes.
  Shard(ParameterTable table, std::uint32_t shard, std::uint64_t memory = usable_memory());
  // Throws InvalidArgument where the snapshot is not of that form, or holds NaN.
  explicit Shard(Snapshot snapshot, std::uint64_t memory = usable_memory());

  const ParameterTable& table() const noexcept { return table_; }
  std::uint16_t mark() const noexcept { return mark_; }  // of the table
  const ShardLayout& layout() const noexcept { return layout_; }
  std::uint64_t version() const noexcept { return version_; }
  bool has_values() const noexcept { return version_ != kNoVersion; }
  const Words& values() const {  // needs them
    return vectors_ ? *vectors_->find(kParameters) : arrays_.front().values;
  }

  // Take one frame of a request; return the answer after the last frame. Throw InvalidArgument for
  // a frame that no client of this table sends.
  std::optional<Answer> set(ClientId client, const ServeMessage& message);
  std::optional<Answer> push(ClientId client, const ServeMessage& message);

  // Returns null unless ParameterTable::staged().
  const Vectors* vectors() const noexcept { return vectors_.get(); }
  // Runs packed Commands; returns packed CommandResults. Throws InvalidArgument, and changes
  // nothing, where one cannot be run, or changes vectors against `may_change`.
  std::vector<std::byte> ask(ConstBytes commands, bool may_change);

  // Needs values. Throws NoRoom where it needs more memory than there may be.
  Pull begin_pull(ClientId client, const MessageHeader& request);
  // Writes the next frame of a pull to `out`, of kMostPayload bytes, and its header. Returns
  // whether it was the last.
  bool pull_frame(ClientId client, Pull& pull, MessageHeader& header, Bytes out, Copy copy);

  // Returns a copy of what a client has by pulls of differences; empty before the first.
  const std::vector<float>& shadow(ClientId client) { return clients_[client].shadow; }

  // Makes a client one whose pushes rounds wait for, with the rule `rounds`.
  void join(ClientId client);
  // Drops a client's incomplete requests and the copy of what it has.
  void leave(ClientId client);

  // With the rule `rounds`: ends the open round if it is over. Nothing of it counts where the
  // result would not be finite. Returns a line for the log where it ended without a quorum.
  std::string end_round_if_over();
  // Returns when the open round is over without another push.
  Deadline round_due() const { return rounds_ ? rounds_->due() : Deadline::never(); }

  // A snapshot is made in steps. outline() returns it without values; the caller resizes each array
  // to layout().elements(); begin_snapshot() fixes the version; copy_block(), called repeatedly,
  // copies the values, and calls `done` after the last.
  Snapshot outline() const;
  void begin_snapshot(std::shared_ptr<Snapshot> to, std::function<void()> done);
  // Returns whether a snapshot is under way.
  bool copy_block();
  Statistics& statistics() noexcept { return statistics_; }
  void log_to(std::function<void(const AppliedFrame&)> log) { log_ = std::move(log); }

 private:
  // The frames of a SET or a PUSH so far.
  struct OpenRequest {
    std::uint32_t sequence = 0;
    std::size_t next = 0;  // frame
    std::uint64_t version = 0;
    float rate = 0;
    Answer answer;
    bool applied = false;
    Words staged;  // of a SET, of a push of several frames, and with ParameterTable::staged()
    // With ParameterTable::staged():
    StagedPush name;
    std::optional<Vectors::Arrival> arrival{};  // of what is kept of it
  };
  struct ClientState {
    OpenRequest set, push;
    std::vector<float> shadow;  // what it has by pulled differences
  };

  const ShardFrame& take_frame(OpenRequest& request, const ServeMessage& message) const;
  void begin_push(OpenRequest& push, const MessageHeader& header);
  void refuse_if_stale(OpenRequest& push);
  void take_push(ClientId client, OpenRequest& push, const ShardFrame& frame,
                 const ServeMessage& message);
  Answer end_push(ClientId client, OpenRequest& push);
  std::optional<Answer> stage(OpenRequest& push, const ServeMessage& message);
  void begin_staging(OpenRequest& push);
  void end_staging(OpenRequest& push);
  void abandon(OpenRequest& push);
  void drop_staged(OpenRequest& push);
  // Saves a frame for snapshots under way; must be called before arrays_ or steps_ change there.
  void keep(std::size_t frame);
  void refuse_not_finite(OpenRequest& push, const char* why);
  bool make_room(OpenRequest& request);
  std::string why_no_room_for(std::size_t words);
  float rate_of(const OpenRequest& push) const noexcept;
  // Computes what `change` makes of a frame's values and state, into update_. Returns whether that
  // is finite.
  using Change = std::function<void(float* w, std::span<float* const> states, std::size_t n)>;
  bool compute(std::size_t frame, const Change& change);
  // Puts into place what compute() has made.
  void put(std::size_t frame);
  bool update(OpenRequest& push, std::size_t frame, const float* gradient);
  void apply(ClientId client, OpenRequest& push, std::size_t frame, const float* gradient);
  void apply_staged(ClientId client, OpenRequest& push);
  std::uint64_t staleness(const OpenRequest& push) const noexcept;
  std::size_t encode(const codec::Codec& codec, const ShardFrame& frame, const float* x, Bytes out,
                     Copy copy) const;
  std::size_t encode_difference(std::uint16_t codec, const ShardFrame& frame, const float* w,
                                float* shadow, Bytes out);
  SharedWords frozen();

  ParameterTable table_;
  std::uint16_t mark_;
  std::uint32_t index_;
  Codecs codecs_;
  ShardLayout layout_;
  UpdateRule rule_;
  std::uint64_t memory_;  // bytes
  std::uint64_t version_ = kNoVersion;
  std::uint64_t first_version_ = 0;           // with which it began: of a snapshot
  std::vector<Snapshot::StateArray> arrays_;  // empty with vectors_
  std::unique_ptr<Vectors> vectors_;          // with ParameterTable::staged()
  std::optional<Rounds> rounds_;              // with the rule `rounds`
  std::vector<std::uint64_t> steps_;
  std::map<ClientId, ClientState> clients_;
  std::vector<SnapshotCopy> copies_;        // under way
  std::vector<float> scratch_;              // a frame
  std::vector<std::vector<float>> update_;  // the next values of a frame, for each of arrays_
  Words spare_;                             // memory of the last staged push, for the next
  std::weak_ptr<const Words> frozen_;
  std::vector<std::weak_ptr<const Words>> copies_of_values_;  // frozen(), while pulls have them
  std::uint64_t frozen_version_ = kNoVersion;
  Statistics statistics_;
  std::function<void(const AppliedFrame&)> log_;
};

// Returns whether pulls with this codec are differences to what the client has; others are casts.
bool pulls_differences(const codec::Codec& codec);

}  // namespace gradwire::serve
