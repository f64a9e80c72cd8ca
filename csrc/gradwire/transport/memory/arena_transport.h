// The transport over shared memory: shm and inproc, which differ in how ranks share their arenas.
#pragma once

#include <array>

#include "gradwire/transport/memory/arena.h"
#include "gradwire/transport/memory/distance.h"
#include "gradwire/transport/staged.h"

namespace gradwire::transport {

// How a rank gives its arena to the peer at the other end of `socket`, and gets the peer's.
struct ArenaExchange {
  // Does not block; null where take() also gives.
  void (*give)(int socket, const Arena& own, const LinkId& link);
  std::shared_ptr<Arena> (*take)(int socket, const std::shared_ptr<Arena>& own, const LinkId& link,
                                 const LinkOptions& options, const WaitLimit& wait_limit);
};

class ArenaTransport final : public StagedTransport {
 public:
  ArenaTransport(std::string_view name, const LinkOptions& options, ArenaExchange exchange);

  void close_offers() noexcept override { own_->close_descriptor(); }
  void end(Rank peer) noexcept override;
  Copy copy() const noexcept override { return copy_; }
  void limit_unread(int messages) noexcept override;
  void arm() override;
  void disarm() override;

 private:
  // Both ends wake each other through the socket, whose end means that the peer has ended. There is
  // none where the LinkOptions have bells.
  struct ArenaLink {
    std::shared_ptr<Arena> arena;
    std::size_t posted = 0;    // where our next descriptor goes in the peer's queue of our arena
    std::size_t consumed = 0;  // where the next one is in our queue of the peer's arena
    std::size_t room = 0;      // messages that fit there, as known without another look
    int front = 0;             // the cell that arrived() showed last
    unsigned cells = 0;        // how many cells arrived() has shown
    LineTimes lines;           // times of their first lines
  };

  void introduce(const Stream& to, Rank peer) override;
  void connect(Rank peer, const WaitLimit& wait_limit) override;
  bool has_most_unread(Rank peer) override;
  int find_room(std::span<const Rank> peers, std::size_t bytes) override;
  std::byte* staging(int cell) noexcept override;
  void post(int cell, std::size_t bytes, std::span<const Rank> peers) override;
  std::optional<ConstBytes> arrived(Rank peer) override;
  void consume(Rank peer) override;
  void disconnected(Rank peer) override;

  ArenaLink& link_to(Rank peer) noexcept { return links_[at(peer)]; }
  std::size_t next(std::size_t position) const noexcept;
  std::size_t look_for_room(Rank peer) noexcept;
  bool is_far(Rank peer) noexcept;
  int free_cell() noexcept;
  void time_line(ArenaLink& link, const std::byte* line) noexcept;
  void want_room() noexcept;
  void wake(Rank peer) noexcept;
  void drop_unread(Rank peer) noexcept;

  ArenaExchange exchange_;
  std::size_t messages_;
  std::size_t unread_limit_;  // of these, unread by one peer
  std::shared_ptr<Arena> own_;
  std::vector<ArenaLink> links_;
  bool starved_ = false;
  LineClock clock_;
  std::size_t next_cell_ = 0;
  Copy copy_ = copy_cached;                                 // how to copy into the open reservation
  alignas(64) std::array<std::byte, kSmallMessage> small_;  // staging of the open reservation
};

}  // namespace gradwire::transport
