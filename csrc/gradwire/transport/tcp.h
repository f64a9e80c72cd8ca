// tcp: one stream socket per peer, or several where the way is long: one stream fills it only as
// far as the kernel's buffers go. A message is sent as prefix, payload and padding to 8 bytes; over
// a sealed socket payload and padding are encrypted, and a tag follows, which covers the prefix. A
// sender stages it in a cell and pushes out what a socket takes; a receiver reads each stream into
// one buffer, in which whole frames are shown in place, in the order of their numbers. Where two
// ranks have several ways to each other, TcpWays has what lets the link outlive one of them.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradwire/transport/queued.h"
#include "gradwire/transport/tcp_frames.h"
#include "gradwire/transport/tcp_traffic.h"
#include "gradwire/transport/ways/tcp_ways.h"

namespace gradwire::transport {

// A way or a stream is stalled while nothing that was sent by it is acknowledged for so long.
inline constexpr double kStalledSeconds = 1;

class TcpTransport final : public QueuedTransport {
 public:
  explicit TcpTransport(const LinkOptions& options);
  ~TcpTransport() override;

  // Clears stale edges, since the bell is edge-triggered, before the caller's last look. So a peer
  // from which nobody reads does not keep it ringing.
  void arm() override;
  void disarm() override { armed_ = false; }
  bool deliver() override;

 private:
  using Clock = std::chrono::steady_clock;
  struct TcpStream {
    Stream wire{-1};
    int wakes_at = 1;    // received bytes for which the kernel rings the doorbell
    AlignedBuffer copy;  // of a frame that this stream changes, where others read its cell, too
    int cell = kNoCell;  // that is being sent
    ConstBytes unsent;   // of its frame; empty where none of it was sent
    Inbox inbox;
    bool ended = false;
    int way = 0;
    TcpStall stall;
  };
  struct TcpLink {
    std::vector<TcpStream> streams;    // one, or more over a long way
    TcpStream* front = nullptr;        // the stream of the message that was shown
    std::uint32_t sent = 0, read = 0;  // frames; not counted where there is one stream
    std::unique_ptr<TcpWays> ways;     // counts them where there are several ways
    Clock::time_point look_at;
    bool counts() const noexcept { return streams.size() > 1; }
  };

  void connect(Rank peer, const WaitLimit& wait_limit) override;
  void add_stream(const Connection& from, Rank peer, bool several);
  TcpStream make_stream(const Connection& from, Rank peer, bool several);
  void watch_streams();
  std::size_t unsent(Rank peer) const override;
  std::byte* staging(int cell) noexcept override { return frame(cell) + kPayloadAt; }
  void post(int cell, std::size_t bytes, std::span<const Rank> peers) override;
  std::optional<ConstBytes> arrived(Rank peer) override;
  void consume(Rank peer) override;

  TcpLink& link_to(Rank peer) noexcept { return links_[at(peer)]; }
  std::byte* frame(int cell) noexcept { return frames_[at(cell)].data(); }
  void push_out(Rank peer) override;
  void push_on(Rank peer) override;
  bool push(TcpStream& stream, Rank peer);
  bool begin_frame(TcpStream& stream, Rank peer);
  ConstBytes on_wire(TcpStream& stream, Rank peer);
  void finish_frame(TcpStream& stream) noexcept;
  bool read_some(TcpStream& stream, Rank peer);
  void await_frame(TcpStream& stream) noexcept;
  void end_stream(const TcpStream& stream, Rank peer, const std::string& failure);
  void drop_unsent(Rank peer, const std::string& reason);
  void look_after(Rank peer);
  void end_if_swallowed(Rank peer, Clock::time_point now);

  // Of links by several ways: ways/tcp_by_ways.cc.
  std::optional<ConstBytes> arrived_by_ways(Rank peer);
  void set_all_aside(Rank peer);
  void set_aside(Rank peer, const Inbox::Numbered& frame);
  void end_way(const TcpStream& stream, Rank peer, const std::string& failure);
  void acknowledge(Rank peer, bool missing);
  bool serve_ways(Rank peer);
  void add_way(const Connection& from, Rank peer);
  void take_new_ways(Rank peer);
  void renew_way(Rank peer, int way, std::vector<Connection> sockets);
  void renew_socket(Connection& old, Connection made, Rank peer);
  bool begin_kept_frame(TcpStream& stream, Rank peer);
  ConstBytes on_wire(TcpStream& stream, ConstBytes kept);
  void look_after_ways(Rank peer, Clock::time_point now);

  std::shared_ptr<TcpTraffic> traffic_;
  std::vector<TcpLink> links_;
  std::vector<AlignedBuffer> frames_;  // by cell
  std::vector<Rank> looked_after_;     // peers with several streams
  UniqueFd timer_;                     // rings the doorbell where there are such peers
  bool armed_ = false;                 // this rank looks once more before it sleeps
};

}  // namespace gradwire::transport
