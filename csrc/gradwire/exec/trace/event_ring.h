// EventRing: the last events of a communicator, in memory that is allocated once. One thread at a
// time adds events and never waits; any other may read at any time.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradwire::exec {

// What an event tells; python/gradwire/_trace/parts.py reads these numbers.
enum class EventKind : std::uint8_t {
  kCall = 1,     // a collective, from its turn to its end
  kPhase = 2,    // a plan of it
  kSend = 3,     // a frame was staged: encoded, or copied
  kReceive = 4,  // a frame was landed: decoded, added or copied
  kWait = 5,     // nothing moved: a peer's frame was missing, or a peer did not read
  kLocal = 6,    // work of the collective outside of its plans
  kMessage = 7,  // a frame of a message of send or recv
  kBlocked = 8,  // a thread of the program waited for a call
};

// Flags of events.
inline constexpr std::uint8_t kEventReduces = 1;  // receive: adds to what is there
inline constexpr std::uint8_t kEventAgain = 2;    // send: the same work for one more peer;
                                                  // receive: one more frame in the same work
inline constexpr std::uint8_t kEventReader = 4;   // wait: for the peer to read
inline constexpr std::uint8_t kEventFailed = 8;   // call: it failed
inline constexpr std::uint8_t kEventSent = 16;    // message: sent, else received

// Times are nanoseconds of the recorder's clock.
struct Event {
  EventKind kind = EventKind::kCall;
  std::uint8_t flags = 0;
  std::uint16_t round = 0;      // frame; call: number of phases
  std::int32_t peer = -1;       // frame, wait, message; blocked: the thread's number
  std::uint32_t operation = 0;  // number of the phase (the first one of a call), or of the message
  std::uint32_t segment = 0;    // frame; message: number of the frame
  std::uint64_t begin = 0;
  std::uint64_t duration = 0;
  std::uint64_t bytes = 0;  // on the wire, headers included; call: sent in all
  // Nanoseconds in the codec; call: nanoseconds from its submission to its turn, high and low half.
  std::uint32_t encode = 0, decode = 0;
  std::uint64_t plain = 0;  // frame: bytes of its elements without a codec; call: of its inputs
  std::uint64_t label = 0;  // call, phase: of the text that describes it

  bool operator==(const Event&) const = default;
};
static_assert(sizeof(Event) == 64);

class EventRing {
 public:
  // Allocates room for that many events, rounded up to a power of two. The oldest is never read,
  // since its slot is the next to be written.
  explicit EventRing(std::size_t capacity);

  std::size_t capacity() const noexcept { return slots_.size(); }
  void add(const Event& event) noexcept;
  // Returns how many events were added, those that have been overwritten since too.
  std::uint64_t added() const noexcept { return added_.load(std::memory_order_acquire); }
  // Returns the last events, oldest first, and writes to `dropped` how many came before them.
  std::vector<Event> read(std::uint64_t& dropped) const;

 private:
  // Words, so that reading what is being overwritten is defined; then it is thrown away. A store
  // releases the count before it, and a load acquires it: the reader sees that a slot is taken.
  static constexpr std::size_t kWords = sizeof(Event) / sizeof(std::uint64_t);
  using Slot = std::array<std::atomic<std::uint64_t>, kWords>;

  std::vector<Slot> slots_;
  std::atomic<std::uint64_t> added_{0};
};

}  // namespace gradwire::exec
