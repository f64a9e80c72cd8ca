// Client: one process's connection to all shards of a parameter server, and the thread that moves
// its data. Calls return at once, with a ClientCall to wait for. Until it is over, the caller's
// arrays must stay valid, and those of a push unchanged.
//
// While two pushes are not acknowledged, further ones are added up, and sent as one when an
// acknowledgement comes: a slow network makes pushes rarer, but holds nobody up.
//
// When a channel ends, all open and later calls end with TransportError, which names the shard. To
// go on, make a new Client.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gradwire/base/deadline.h"
#include "gradwire/base/work.h"
#include "gradwire/serve/client/outgoing.h"
#include "gradwire/serve/shard/shard.h"
#include "gradwire/serve/wire/channel.h"
#include "gradwire/serve/wire/poller.h"
#include "gradwire/serve/wire/table.h"

namespace gradwire::serve {

// Pushes that may be under way; more are merged.
inline constexpr std::size_t kMostUnacknowledged = 2;

// For each parameter, its words: see ParameterTable::words().
using Values = std::vector<std::span<float>>;

// One operation on all shards.
class ClientCall {
 public:
  const Work& work() const noexcept { return work_; }
  // What each shard replied; to be called when the work is done.
  const std::vector<std::string>& texts() const noexcept { return texts_; }
  const std::vector<std::uint64_t>& versions() const noexcept { return versions_; }
  // Returns each shard's results of commands. Throws InvalidArgument for a malformed reply.
  std::vector<std::vector<CommandResult>> results() const;
  // Returns how many shards refused it: a push that is too stale, or initial values that are not
  // the first.
  std::size_t refusals() const noexcept { return refusals_; }
  // Returns whether this is a merged push, which sends a copy: the caller's arrays are free.
  bool copied() const noexcept { return !sums_.empty(); }

 private:
  friend class Client;

  Work work_;
  Op op_ = Op::kBye;
  Deadline deadline_ = Deadline::never();
  std::uint32_t sequence_ = 0;
  std::uint64_t version_ = 0;  // of WAIT
  std::uint16_t codec_ = 0;
  float rate_ = 0;
  std::vector<bool> answered_;
  std::vector<std::string> texts_;
  std::vector<std::uint64_t>
      versions_;  // of a push until the replies: of the parameters it is from
  ClientRole role_ = ClientRole::kReplica;  // of JOIN
  std::vector<std::byte> payload_;  // of ASK; of a staged push: its name, before the first frame
  std::size_t refusals_ = 0;
  std::exception_ptr error_;
  Values values_;                                          // of a pull
  std::unique_ptr<Outgoing> outgoing_;                     // of SET and PUSH
  std::vector<std::vector<float>> sums_;                   // that outgoing_ sends, of merged pushes
  std::vector<std::vector<std::vector<std::byte>>> sent_;  // payloads by shard, to be given back
  std::shared_ptr<codec::ErrorFeedback> feedback_;
  bool gives_back_ = false;  // a shard has refused it as too stale
  bool over_ = false;
};

struct PushOptions {
  std::string codec = "none";
  std::vector<std::string> codecs{};                 // one for each parameter, in place of `codec`
  std::shared_ptr<codec::ErrorFeedback> feedback{};  // null: what a lossy codec loses is lost
  float rate = 0;                                    // 0: the rule's
  bool strict = false;                               // wait for an acknowledgement; never merge
  // For each shard, the version from which the gradients were computed; empty: those pulled last.
  std::vector<std::uint64_t> versions{};
  // The push's name: required by a table with the rule kStaged, refused by others.
  std::optional<StagedPush> staged{};
};

class Client {
 public:
  // `shards`: a channel to each shard, in order. Throws InvalidArgument for another number of them.
  Client(ParameterTable table, ClientId id, std::vector<std::unique_ptr<Channel>> shards);
  ~Client();  // closes at once
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Starts the thread. Without it turn() has to be called.
  void start();
  // Does what there is to do, without waiting; returns whether there was something.
  bool turn();
  // Waits for pushes under way, says goodbye and ends the thread, within the limit. Calls that are
  // still open end with Aborted.
  void close(const WaitLimit& limit);

  const ParameterTable& table() const noexcept { return table_; }

  // Any thread may call what follows. A call that is not over at its deadline ends with Timeout.
  std::shared_ptr<ClientCall> join(Deadline deadline, ClientRole role = ClientRole::kReplica);
  std::shared_ptr<ClientCall> set(Gradients values, Deadline deadline);
  // With `strict`, waits for room; throws Timeout, or what check_interrupt() of the limit throws.
  std::shared_ptr<ClientCall> push(const Gradients& gradients, const PushOptions& options,
                                   const WaitLimit& limit, Deadline deadline);
  std::shared_ptr<ClientCall> pull(Values values, const std::string& codec, Deadline deadline);
  // `op`: kWait (until the shards have that version), kStats or kSnapshot.
  std::shared_ptr<ClientCall> ask(Op op, std::uint64_t version, Deadline deadline);
  // Gives commands to the vectors of all shards; ClientCall::results() has what each replied.
  std::shared_ptr<ClientCall> ask(std::span<const Command> commands, Deadline deadline);

  // Returns, for each shard, the version that this client pulled last; kNoVersion before.
  std::vector<std::uint64_t> versions() const;
  std::uint64_t merged() const;  // pushes that were added to others
  std::uint64_t stale() const;   // refusals of pushes

 private:
  struct ShardLink {
    std::unique_ptr<Channel> channel;
    ShardLayout layout;
    std::size_t next = 0;    // frame of outgoing_.front()
    int limited_frames = 0;  // frames still to be sent with few unread at a time
    std::map<std::uint32_t, std::shared_ptr<ClientCall>> waiting{};  // for a reply of one frame
    std::deque<std::shared_ptr<ClientCall>> pulls{};
    std::size_t pulled = 0;  // frames of the first pull
    std::uint64_t pulled_version = 0;
    std::vector<float> mirror{};  // of pulled differences
    bool has_mirror = false;      // or will have, when the pulls under way are done
    bool removed = false;         // from the poller, when it has ended
  };
  struct Merged {
    std::shared_ptr<ClientCall> call;
    PushOptions options;
  };

  std::shared_ptr<ClientCall> make_call(Op op, Deadline deadline) const;
  std::shared_ptr<ClientCall> submit(std::shared_ptr<ClientCall> call);
  template <typename Arrays>
  void check_sizes(const Arrays& arrays) const;
  void prepare_push(ClientCall& call, Gradients gradients, const PushOptions& options) const;
  bool merge(const Gradients& gradients, const PushOptions& options, Deadline deadline,
             std::shared_ptr<ClientCall>& call);

  bool pass();
  bool serve(Channel& channel);
  bool take_submitted();
  bool submit_merged();
  void start_call(const std::shared_ptr<ClientCall>& call);
  void join(ShardLink& link, const std::shared_ptr<ClientCall>& call);
  void request(ShardLink& link, const ClientCall& call, std::uint32_t extra = 0);
  MessageHeader header_of(const ClientCall& call) const;
  bool send_frame(ShardLink& link);
  bool open_outgoing();
  void remember(ShardLink& link, ClientCall& call, ConstBytes payload);
  void next_outgoing();
  void drop_first_outgoing();
  bool take_message(ShardLink& link);
  void handle(ShardLink& link, const ServeMessage& message);
  void take_values(ShardLink& link, const ServeMessage& message);
  void take_refused_pull(ShardLink& link, const ServeMessage& message);
  void install(ShardLink& link, const ShardFrame& frame, const ServeMessage& message,
               const ClientCall& call, bool dense);
  void note_version(const ShardLink& link, std::uint64_t version);
  void answered(const ShardLink& link, const std::shared_ptr<ClientCall>& call);
  void refused(ShardLink& link, ClientCall& call, const ServeMessage& reply);
  void give_back_refused();
  void finish(const std::shared_ptr<ClientCall>& call, const std::exception_ptr& error);
  void cut_short(const std::shared_ptr<ClientCall>& call, const std::exception_ptr& error);
  void await_pushes(const WaitLimit& limit);
  void await_acknowledgement(std::uint64_t seen, const WaitLimit& limit);
  bool may_expire(const std::shared_ptr<ClientCall>& call) const;
  void expire();
  void look_for_ends();
  void fail(const std::exception_ptr& error);
  void say_goodbye(const WaitLimit& limit);
  Deadline earliest() const;
  void run();
  std::size_t index_of(const ShardLink& link) const;

  const ParameterTable table_;
  const std::uint16_t mark_;  // of the table
  const ClientId id_;
  const Codecs codecs_;
  const Copy install_;  // copies pulled values to the arrays of the caller
  std::vector<ShardLink> links_;
  std::map<Channel*, ShardLink*> by_channel_;
  Poller poller_;
  std::vector<std::shared_ptr<ClientCall>> open_;
  std::deque<std::shared_ptr<ClientCall>> outgoing_;  // the first one is being sent
  bool opened_ = false;                               // outgoing_.front()'s residuals
  std::vector<std::shared_ptr<ClientCall>> returning_;
  std::uint32_t next_sequence_ = 1;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable acknowledged_;
  std::uint64_t acknowledgements_ = 0;  // pushes that ended
  std::vector<std::shared_ptr<ClientCall>> submitted_;
  std::vector<std::uint64_t> versions_;
  std::size_t unacknowledged_ = 0;  // pushes
  struct {
    std::uint64_t merged = 0, stale = 0;
  } counts_;
  std::exception_ptr failure_;
  bool closing_ = false;

  std::mutex merge_mutex_;  // taken before mutex_; guards merged_ while it is added to
  Merged merged_;
  std::thread thread_;
};

}  // namespace gradwire::serve
