// Server: one shard, and the thread that serves its clients. The thread never waits for a client:
// in turns it takes a frame from each that has sent one, and sends one to each that has room.
//
// The caller accepts and authenticates connections, makes channels of them and admits these, at any
// time. A client that ends, hangs or sends invalid frames loses only its own channel.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "gradwire/base/log.h"
#include "gradwire/base/wait_limit.h"
#include "gradwire/serve/shard/memory.h"
#include "gradwire/serve/shard/shard.h"
#include "gradwire/serve/wire/channel.h"
#include "gradwire/serve/wire/poller.h"

namespace gradwire::serve {

// Suffix of the farewell to a replaced client: it must not reconnect, or the two would evict each
// other.
inline constexpr const char* kReplaced = "joined under this one's name";

class Server {
 public:
  struct Options {
    std::uint32_t shard = 0;
    std::uint32_t shards = 1;
    Log log = log_to_stderr;                 // on the server's thread: clients that join or end
    std::uint64_t memory = usable_memory();  // bytes; see Shard. Larger tables are refused
    double join_seconds = 60;                // time from a JOIN's first frame to its last
  };
  // How many clients there are and were.
  struct Census {
    std::size_t joined = 0;    // now
    std::size_t admitted = 0;  // ever
    bool has_values = false;
  };

  explicit Server(Options options);
  // Goes on from a snapshot.
  Server(Options options, Snapshot snapshot);
  ~Server();  // stops
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Starts the thread. Without it turn() has to be called.
  void start();
  // Does what there is to do, without waiting; returns whether there was something.
  bool turn();
  // Ends all channels and the thread. The shard keeps all that was acknowledged; snapshot() still
  // works.
  void stop();

  // Any thread may call what follows.

  // Serves the client at the other end of a channel. The low 16 bits of its id are its incarnation:
  // a newer incarnation replaces an older one, whose channel is ended. Once stopped, ends the
  // channel.
  void admit(std::unique_ptr<Channel> channel, ClientId client);
  // Throw Timeout where the thread does not answer within the limit.
  Snapshot snapshot(const WaitLimit& limit);  // InvalidArgument while there are no values
  std::string statistics(const WaitLimit& limit);
  Census census(const WaitLimit& limit);

  // Waits at most `seconds` for a client to ask for a snapshot. Returns a ticket for
  // snapshot_written(), which answers the client: `error` says why none was written, or is empty.
  std::optional<std::uint64_t> snapshot_wanted(double seconds);
  void snapshot_written(std::uint64_t ticket, const std::string& error);

  // Calls `log` for each frame that is applied, on the server's thread. To be set before start().
  void log_frames(std::function<void(const AppliedFrame&)> log);

 private:
  struct Peer {
    ClientId id = 0;
    std::unique_ptr<Channel> channel;
    std::string table;                     // the text of a JOIN so far
    std::uint64_t began = 0;               // order in which clients began to join
    Deadline join_by = Deadline::never();  // while the JOIN is not complete
    bool joined = false;
    ClientRole role = ClientRole::kReplica;
    bool left = false;                // said goodbye
    bool expelled = false;            // ended by this shard; other shards may keep it
    std::deque<MessageHeader> pulls;  // that wait for the pull under way, or for initial values
    std::optional<Shard::Pull> pull;
    std::vector<MessageHeader> waits;
  };
  struct Ticket {
    ClientId client = 0;
    MessageHeader request;
  };

  bool pass();
  bool serve(Channel& channel);
  bool begin_pull(Peer& peer);
  bool send_frame(Peer& peer);
  bool takes_more(const Peer& peer) const;
  bool take_message(Peer& peer);
  void handle(Peer& peer, const ServeMessage& message);
  void join(Peer& peer, const ServeMessage& message);
  void take_text(Peer& peer, const ServeMessage& message);
  void limit_texts();
  void end_late_joins();
  void expel(Peer& peer, std::string_view why);
  void accept_table(Peer& peer, const MessageHeader& header);
  void accept_role(Peer& peer, const MessageHeader& header);
  void ask(Peer& peer, const ServeMessage& message);
  void refuse_coordinator(Peer& peer, const MessageHeader& request);
  void refuse_if_too_large(const ParameterTable& table) const;
  void want_snapshot(Peer& peer, const MessageHeader& header);
  void answer(Peer& peer, const MessageHeader& request, const std::optional<Answer>& answer);
  void reply(Peer& peer, const MessageHeader& request, std::string_view text = {});
  void refuse(Peer& peer, const MessageHeader& request, const Answer& answer);
  void wait(Peer& peer, const MessageHeader& header);
  void version_changed();
  void answer_waits(Peer& peer);
  bool take_admitted();
  bool remove_ended();
  bool run_calls();
  void run_each(const std::vector<std::function<void()>>& calls);
  bool end_run();
  void say(std::string_view line) const noexcept;
  void replace(const Peer& newer);
  static void send_goodbye(Channel& channel, std::string_view why);
  std::string statistics_text();
  template <typename Body>
  std::invoke_result_t<Body> on_thread(Body body, const WaitLimit& limit);
  bool copy_block();
  Deadline round_due() const;
  void run();
  Shard& shard();

  const Options options_;
  std::unique_ptr<Shard> shard_;  // null until the first client has brought a table
  std::map<Channel*, Peer> peers_;
  Poller poller_;
  std::size_t admitted_ = 0;
  std::uint64_t announced_version_ = kNoVersion;  // to clients that wait for one
  std::uint64_t joins_ = 0;
  Deadline first_join_by_ = Deadline::never();  // of all peers, or earlier
  std::function<void(const AppliedFrame&)> frame_log_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable wanted_;
  std::vector<Peer> arrivals_;
  std::vector<std::function<void()>> calls_;
  std::map<std::uint64_t, Ticket> tickets_;
  std::deque<std::uint64_t> new_tickets_;
  std::uint64_t next_ticket_ = 1;
  bool stopping_ = false;
  bool running_ = false;  // the thread runs calls_; else callers run theirs, holding the mutex
  std::thread thread_;
};

}  // namespace gradwire::serve
