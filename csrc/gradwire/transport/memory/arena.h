// Arena: the memory in which one rank stages what it sends, shared with all who read it.
//
// It has `messages` cells of max_message bytes. Each cell counts the readers that still need it.
// Each reader has a queue of `messages` entries, and a word that says whether it is far away. An
// entry is two cache lines: a descriptor (which cell, how many bytes), which is one atomic word,
// zero for none; and room for a message so small that it needs no cell and is sent with its
// descriptor. No index is shared.
//
// Waking follows Dekker's algorithm, by sequentially consistent operations: the owner announces
// that it will sleep, then looks once more; the others write, then look whether it sleeps.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "gradwire/base/fd.h"
#include "gradwire/transport/socket.h"
#include "gradwire/transport/transport.h"

namespace gradwire::transport {

// Probes whether this machine has memory to share.
OpenedTransport open_shared_memory(const Settings& settings);
// The built-in cost model's costs of links over shared memory.
inline constexpr LinkCost kMemoryCost{1.5e-7, 2e-7, 0, 0};

// The largest message that is stored in the entry itself, and needs no cell.
inline constexpr std::size_t kSmallMessage = 120;  // bytes

// A cell and a length in one word that is never zero.
struct Descriptor {
  static constexpr std::uint64_t kNone = 0;
  static constexpr int kInEntry = 0x7fffffff;  // in place of a cell: a small message
  static std::uint64_t pack(int cell, std::size_t bytes) noexcept {
    return (static_cast<std::uint64_t>(bytes) << 32) | (static_cast<std::uint32_t>(cell) + 1U);
  }
  explicit Descriptor(std::uint64_t word) noexcept
      : cell(static_cast<std::uint32_t>(word) - 1U),
        bytes(static_cast<std::uint32_t>(word >> 32)) {}

  std::uint32_t cell;
  std::uint32_t bytes;
};

class Arena {
 public:
  // Makes an arena in fresh shared memory, sealed against resizing: a peer that truncates it would
  // make others fail with SIGBUS.
  static std::shared_ptr<Arena> create(const LinkOptions& options);
  // Maps the peer's arena. Throws TransportError where the descriptor is not what the peer's
  // create() makes.
  static std::shared_ptr<Arena> map(UniqueFd memory, const LinkId& link,
                                    const LinkOptions& options);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The memory's descriptor; the mapping stays when it is closed.
  int descriptor() const noexcept { return memory_.get(); }
  void close_descriptor() noexcept { memory_.reset(); }

  // The owner sets it before it sleeps; a peer that changes what the owner waits for clears it and
  // wakes the owner.
  std::atomic<std::uint32_t>& sleeping() noexcept;
  // The owner sets it when it finds no room for a message: only then do readers wake it on release.
  std::atomic<std::uint32_t>& wants_room() noexcept;
  // The number of readers that still need the cell.
  std::atomic<std::uint32_t>& readers(std::size_t cell) noexcept;
  // The reader sets it where the owner is far away (transport/memory/distance.h).
  std::atomic<std::uint32_t>& far(Rank reader) noexcept;
  // The reader's queue, a ring of `messages` entries.
  std::atomic<std::uint64_t>& entry(Rank reader, std::size_t position) noexcept;
  // The place of a small message in an entry.
  std::byte* small(Rank reader, std::size_t position) noexcept;
  std::byte* data(std::size_t cell) noexcept;

 private:
  struct Header;
  struct ArenaLayout {
    explicit ArenaLayout(const LinkOptions& options);
    std::size_t messages, far_at, entries_at, data_at, stride, total;  // bytes, except `messages`
  };
  Arena(UniqueFd memory, const LinkOptions& options);
  template <typename Value>
  Value& at(std::size_t offset) const noexcept;

  UniqueFd memory_;
  ArenaLayout layout_;
  std::byte* base_;
};

}  // namespace gradwire::transport
