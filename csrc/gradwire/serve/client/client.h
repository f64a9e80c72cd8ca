// Client: one process's connection to all shards of a parameter server, and the one thread that
// moves its data. Calls return at once, with a Call to wait for; until that is over the arrays of
// the caller must stay, and those of a push unchanged.
//
// Pushes are encoded one after another. While two of them are not acknowledged, the next ones are
// added up and go out as one when an acknowledgement comes, so that a slow network makes pushes
// rarer and holds nobody up.
//
// When a channel ends, all open calls end with TransportError, which names the shard, and so do
// later ones: whoever wants to go on makes a new Client.
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

// One for each parameter, of words: see Table::words().
using Values = std::vector<std::span<float>>;

// One operation on all shards.
class Call {
 public:
  const Work& work() const noexcept { return work_; }
  // When it is done: what each shard replied.
  const std::vector<std::string>& texts() const noexcept { return texts_; }
  const std::vector<std::uint64_t>& versions() const noexcept { return versions_; }
  // Of commands. Throws InvalidArgument where a shard has replied what none would.
  std::vector<std::vector<Result>> results() const;
  // How many shards refused it: a push as too stale, initial values as there were some.
  std::size_t refusals() const noexcept { return refusals_; }
  // Whether this is a merged push, which sends a copy: the caller's arrays are free already.
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
      versions_;                    // of a push until the replies: of the parameters it is from
  Role role_ = Role::kReplica;      // of JOIN
  std::vector<std::byte> payload_;  // of ASK; of a staged push: its name, before the first frame
  std::size_t refusals_ = 0;
  std::exception_ptr error_;
  Values values_;                                          // of a pull
  std::unique_ptr<Outgoing> outgoing_;                     // of SET and PUSH
  std::vector<std::vector<float>> sums_;                   // that outgoing_ sends, of merged pushes
  std::vector<std::vector<std::vector<std::byte>>> sent_;  // payloads by shard, to be given back
  std::shared_ptr<codec::ErrorFeedback> feedback_;
  bool gives_back_ = false;  // a shard has refused it
  bool over_ = false;
};

struct PushOptions {
  std::string codec = "none";
  std::vector<std::string> codecs{};                 // of each parameter, in place of `codec`
  std::shared_ptr<codec::ErrorFeedback> feedback{};  // of a lossy codec; null: what is lost is lost
  float rate = 0;                                    // 0: the rule's
  bool strict = false;  // wait for an acknowledgement rather than merge
  // Of each shard, of the values that the gradients are from; empty: those pulled last.
  std::vector<std::uint64_t> versions{};
  // The name to be kept by, which a table with the rule kStaged needs, and no other takes.
  std::optional<StagedPush> staged{};
};

class Client {
 public:
  // `shards`: in their order. Throws InvalidArgument where the table has another number of them.
  Client(Table table, ClientId id, std::vector<std::unique_ptr<Channel>> shards);
  ~Client();  // closes at once
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Starts the thread. Without it turn() has to be called.
  void start();
  // Handles what there is to do, without waiting; returns whether there was something.
  bool turn();
  // Waits for pushes under way, says goodbye and ends the thread, within the limit. Calls that are
  // open then end with Aborted.
  void close(const WaitLimit& limit);

  const Table& table() const noexcept { return table_; }

  // Any thread may call these. A call that is not over at its deadline ends with Timeout.
  std::shared_ptr<Call> join(Deadline deadline, Role role = Role::kReplica);
  std::shared_ptr<Call> set(Gradients values, Deadline deadline);
  // Throws Timeout or what check_interrupt() of the limit throws where `strict` has to wait.
  std::shared_ptr<Call> push(const Gradients& gradients, const PushOptions& options,
                             const WaitLimit& limit, Deadline deadline);
  std::shared_ptr<Call> pull(Values values, const std::string& codec, Deadline deadline);
  // Of kWait, kStats and kSnapshot.
  std::shared_ptr<Call> ask(Op op, std::uint64_t version, Deadline deadline);
  // Gives commands to the vectors of all shards; Call::results() has what each replied.
  std::shared_ptr<Call> ask(std::span<const Command> commands, Deadline deadline);

  // Returns of each shard the version that this client pulled last; kNoVersion before.
  std::vector<std::uint64_t> versions() const;
  std::uint64_t merged() const;  // pushes that were added to others
  std::uint64_t stale() const;   // refusals of pushes

 private:
  struct Link {
    std::unique_ptr<Channel> channel;
    Layout layout;
    std::size_t next = 0;  // frame of outgoing_.front()
    int careful = 0;       // more frames, of which few are under way at a time
    std::map<std::uint32_t, std::shared_ptr<Call>> waiting{};  // for a reply of one frame
    std::deque<std::shared_ptr<Call>> pulls{};
    std::size_t pulled = 0;  // frames of the first pull
    std::uint64_t pulled_version = 0;
    std::vector<float> mirror{};  // of pulled differences
    bool has_mirror = false;      // or will have, when the pulls under way are done
    bool removed = false;         // from the poller, when it has ended
  };
  struct Merged {
    std::shared_ptr<Call> call;
    PushOptions options;
  };

  std::shared_ptr<Call> make_call(Op op, Deadline deadline) const;
  std::shared_ptr<Call> submit(std::shared_ptr<Call> call);
  template <typename Arrays>
  void check_sizes(const Arrays& arrays) const;
  void prepare_push(Call& call, Gradients gradients, const PushOptions& options) const;
  bool merge(const Gradients& gradients, const PushOptions& options, Deadline deadline,
             std::shared_ptr<Call>& call);

  bool pass();
  bool serve(Channel& channel);
  bool take_submitted();
  bool submit_merged();
  void start_call(const std::shared_ptr<Call>& call);
  void join(Link& link, const std::shared_ptr<Call>& call);
  void request(Link& link, const Call& call, std::uint32_t extra = 0);
  MessageHeader header_of(const Call& call) const;
  bool send_frame(Link& link);
  bool open_outgoing();
  void remember(Link& link, Call& call, ConstBytes payload);
  void next_outgoing();
  void drop_first_outgoing();
  bool take_message(Link& link);
  void handle(Link& link, const Message& message);
  void take_values(Link& link, const Message& message);
  void take_refused_pull(Link& link, const Message& message);
  void install(Link& link, const ShardFrame& frame, const Message& message, const Call& call,
               bool dense);
  void note_version(const Link& link, std::uint64_t version);
  void answered(const Link& link, const std::shared_ptr<Call>& call);
  void refused(Link& link, Call& call, const Message& reply);
  void give_back_refused();
  void finish(const std::shared_ptr<Call>& call, const std::exception_ptr& error);
  void cut_short(const std::shared_ptr<Call>& call, const std::exception_ptr& error);
  void await_pushes(const WaitLimit& limit);
  void await_acknowledgement(std::uint64_t seen, const WaitLimit& limit);
  bool may_expire(const std::shared_ptr<Call>& call) const;
  void expire();
  void look_for_ends();
  void fail(const std::exception_ptr& error);
  void say_goodbye(const WaitLimit& limit);
  Deadline earliest() const;
  void run();
  std::size_t index_of(const Link& link) const;

  const Table table_;
  const std::uint16_t mark_;  // of the table
  const ClientId id_;
  const Codecs codecs_;
  const Copy install_;  // copies pulled values to the arrays of the caller
  std::vector<Link> links_;
  std::map<Channel*, Link*> by_channel_;
  Poller poller_;
  std::vector<std::shared_ptr<Call>> open_;
  std::deque<std::shared_ptr<Call>> outgoing_;  // the first one is being sent
  bool opened_ = false;                         // outgoing_.front()'s residuals
  std::vector<std::shared_ptr<Call>> returning_;
  std::uint32_t next_sequence_ = 1;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable acknowledged_;
  std::uint64_t acknowledgements_ = 0;  // pushes that ended
  std::vector<std::shared_ptr<Call>> submitted_;
  std::vector<std::uint64_t> versions_;
  std::size_t unacknowledged_ = 0;  // pushes
  std::uint64_t merged_count_ = 0, stale_count_ = 0;
  std::exception_ptr failure_;
  bool closing_ = false;

  std::mutex merge_mutex_;  // taken before mutex_; guards merged_ while it is added to
  Merged merged_;
  std::thread thread_;
};

}  // namespace gradwire::serve
