// TcpWays: what a tcp link keeps that goes over several ways, so that it outlives the failure of
// all but the last one. A sender keeps each frame until the peer has acknowledged it, and sends
// those that were on a failed way again by another one. A receiver sets frames aside that came
// before their turn, since what it waits for may come behind them. Acknowledgements have sockets of
// their own, one a way, so that they never wait behind messages; each is sent by all ways.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/base/types.h"
#include "gradwire/transport/socket.h"
#include "gradwire/transport/tcp_frames.h"
#include "gradwire/transport/ways/tcp_silence.h"
#include "gradwire/transport/ways/ways.h"

namespace gradwire::transport {

// Frames that a peer has not acknowledged, and with it the frames that it may have to set aside.
inline constexpr std::uint32_t kMostKept = 256;
// Their memory in bytes, which the last frame may exceed.
inline constexpr std::size_t kMostKeptBytes = 16 << 20;

// What one end of a link tells the other: all frames before `next` have been read.
struct Acknowledgement {
  std::uint32_t next = 0;
  std::uint32_t missing = 0;  // 1: frame `next` has not come for long, and later ones have
  // By way: a socket of each generation before this one has ended there.
  std::array<std::uint32_t, kMostWays> ended{};
};

class TcpWays {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State { kUsed, kLeftOut, kEnded };

  TcpWays(std::shared_ptr<Ways> ways, std::size_t max_message);
  ~TcpWays();

  // ---- Ways
  bool usable(int way) const noexcept { return ways_[at(way)].state == State::kUsed; }
  bool ended(int way) const noexcept { return ways_[at(way)].state == State::kEnded; }
  bool all_ended() const noexcept;
  // Leaves a way out from now on, for good where it has ended.
  void leave_out(int way, State state, const std::string& why);
  void use_again(int way);
  // Begins a way's next generation, of which add() and add_data() tell the sockets, and sends again
  // what was sent by the one before. It is used once the peer has acknowledged something there: so
  // the peer has it, too.
  void renew(int way, std::uint32_t generation);
  // Tells of ways whose state has lasted; before that the peer may be about to end on all of them.
  void tell(Clock::time_point now);
  // Returns whether the peer's host has all that was sent by ways in use, and none is to be sent
  // again.
  bool delivered() const noexcept;
  // Returns since when no way has been usable; now while one is.
  Clock::time_point unusable_since(Clock::time_point now) noexcept;

  // ---- Sending
  bool has_room() const noexcept {
    return kept_.size() < kMostKept && kept_bytes_ < kMostKeptBytes;
  }
  // Numbers a frame and keeps a copy of it.
  std::uint32_t keep(ConstBytes frame);
  // Returns the frame that must be sent again, if one must.
  std::optional<std::uint32_t> next_again() noexcept;
  // Returns how many must be; none where no way is left, as of one stream that has ended.
  std::size_t to_send_again() const noexcept;
  // Returns a kept frame that is sent by a way now.
  ConstBytes send_by(std::uint32_t number, int way);

  // ---- Receiving
  std::uint32_t read() const noexcept { return read_; }
  // Returns whether a frame came already.
  bool has(std::uint32_t number) const noexcept;
  bool sets_aside() const noexcept { return !early_.empty(); }
  // Throws Error where the peer has sent more than it may.
  void set_aside(std::uint32_t number, ConstBytes payload);
  std::optional<ConstBytes> set_aside_before() noexcept;  // the frame whose turn it is
  void consume() noexcept;
  // Tells that everything has been read that was there.
  void drained(Clock::time_point now) noexcept { drained_ = now; }
  // Returns whether the next frame is missing though later ones have come for long. What this rank
  // has not tried to read, since it pauses or waits for others, is not missing.
  bool misses_one(Clock::time_point now) noexcept;

  // ---- Acknowledgements
  void add(const Stream& wire, int way) { ways_[at(way)].acks.wire = wire; }
  // Tells of a socket that carries frames by a way.
  void add_data(int socket, int way) { ways_[at(way)].data.push_back(socket); }
  // Returns whether so many frames were read since the last acknowledgement.
  bool owes(std::uint32_t frames = kMostKept / 16) const noexcept {
    return read_ - told_ >= frames;
  }
  void acknowledge(bool missing);
  // Reads what has come. Throws Error for what the peer can't have said.
  void hear(Clock::time_point now);
  // Returns whether there may be something to hear.
  bool listens() const noexcept { return !kept_.empty() || !early_.empty(); }
  // Returns whether there may be more to send than there was at the last call.
  bool changed() noexcept { return std::exchange(changed_, false); }

 private:
  struct Kept {
    AlignedBuffer frame;
    std::size_t bytes = 0;
    int way = -1;
    bool again = false;  // it is among those to be sent again
    Clock::time_point sent;
  };
  struct Early {
    AlignedBuffer payload;
    std::size_t bytes = 0;
  };
  struct AckSocket {
    Stream wire{-1};
    std::string unsent;
    std::string heard;
  };
  struct Way {
    State state = State::kUsed;
    std::uint32_t generation = 0;
    bool answered = true;  // the peer has its sockets
    bool told = false;
    Clock::time_point since;
    std::string why;
    AckSocket acks;
    std::vector<int> data;  // sockets
  };

  // How many bytes are allocated for a frame.
  std::size_t room_for(std::size_t bytes) const noexcept;
  AlignedBuffer buffer(std::size_t bytes);
  void give_back(AlignedBuffer spare, std::size_t bytes);
  void send(AckSocket& socket, const Acknowledgement& said);
  void push_out(AckSocket& socket) noexcept;
  bool receive(int way, Clock::time_point now);
  void take_all(AckSocket& socket, Clock::time_point now);
  void take(const Acknowledgement& heard, Clock::time_point now);
  void free_until(std::uint32_t next);
  void send_again(std::uint32_t number);
  Kept& kept(std::uint32_t number) { return kept_[number - first_]; }
  bool others_usable(int than) const noexcept;
  bool in_flight(int way) const noexcept;

  std::shared_ptr<Ways> all_;
  std::size_t max_message_;
  std::vector<Way> ways_;
  bool changed_ = false;  // there may be more to send
  std::optional<Clock::time_point> unusable_;

  std::deque<Kept> kept_;
  std::size_t kept_bytes_ = 0, early_bytes_ = 0;  // allocated
  std::uint32_t first_ = 0;                       // the number of the first kept frame
  std::deque<std::uint32_t> again_;

  std::uint32_t read_ = 0, told_ = 0;
  std::map<std::uint32_t, Early> early_;
  std::optional<Clock::time_point> misses_;  // since when
  std::uint32_t missed_ = 0;                 // the frame
  Clock::time_point drained_;
  std::vector<AlignedBuffer> spare_;
};

}  // namespace gradwire::transport
