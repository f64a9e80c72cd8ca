// Status: a page of memory on which a rank publishes what it does. Any process of the same user can
// read it (status_scan.h), even while the rank's process is stopped or hangs.
//
// The page is a sealed memfd, which readers find by its name among a process's descriptors: no
// socket is served, and nothing is left behind. A forked child inherits the page; `pid` says whose
// it is.
//
// One thread writes at a time, the driver. The version is odd during an update, and then readers
// read again (a seqlock, with release stores instead of fences).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "gradwire/base/error.h"
#include "gradwire/base/fd.h"
#include "gradwire/base/types.h"
#include "gradwire/exec/control/identity.h"

namespace gradwire::exec {

inline constexpr const char* kStatusName = "gradwire-status";

enum class Activity : std::uint64_t {
  kOutside = 1,  // outside of gradwire: the caller computes, or hangs
  kCall = 2,     // in a collective
  kSend = 3,
  kReceive = 4,
  kFailed = 5,
};

struct StatusPage {
  std::uint64_t magic;
  std::int32_t pid;  // in the innermost namespace of its process
  std::int32_t rank;
  std::int32_t size;
  std::int32_t local_size;  // ranks on this host
  std::uint32_t communicator;
  std::uint32_t reserved;
  std::uint64_t tag;  // of the job: the same on all its ranks; tells jobs of one name apart
  std::array<char, 64> job;
  std::array<char, 192> about;  // how the ranks were joined: interface, secret

  // The part that changes, as 64-bit words. `spec` belongs to the call with fingerprint `spec_of`.
  std::uint64_t version;
  struct Current {
    std::uint64_t activity;
    std::uint64_t since;  // when the activity or the wait began: CLOCK_MONOTONIC, ns
    std::uint64_t calls;  // begun so far; the present or last one is call `calls - 1`
    std::uint64_t fingerprint;
    std::uint64_t message;  // number of the message sent or received, between the two ranks
    std::uint64_t peer;     // the rank waited for; all ones: none, or any
    std::uint64_t reads;    // 1: the peer must read what was sent to it; 0: it must send
    std::uint64_t round;
    std::uint64_t segment;
    std::uint64_t spec_of;
    std::array<std::uint64_t, 32> spec;  // text: what is called, or why it failed
  } current;

  Activity activity() const noexcept { return static_cast<Activity>(current.activity); }
  Rank peer() const noexcept { return static_cast<Rank>(current.peer); }
  // Returns the text of the present call; empty if it was not published.
  std::string spec() const;
};

// What a waiting rank waits for.
struct Wait {
  Activity activity = Activity::kCall;
  std::uint32_t number = 0;  // of the call, or of the message between the two ranks
  Rank peer = kNoPeer;       // kNoPeer: none, or any
  bool reads = false;        // the peer must read what was sent to it; else it must send
  std::uint32_t round = 0;
  std::uint32_t segment = 0;
  std::uint32_t fingerprint = 0;
  std::string spec;
};

class Status {
 public:
  // Without memfds the page is private memory, which no other process finds.
  explicit Status(const Identity& identity);
  ~Status() { release(); }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;

  // Both run for every call, so they take only nanoseconds.
  void begin(std::uint32_t call, std::uint32_t fingerprint, std::uint64_t now) noexcept;
  void end() noexcept { set_moving(/*outside=*/true); }

  void set_waiting(const Wait& wait, std::uint64_t since) noexcept;
  // Shows that the rank waits for nobody: `outside` of any call, or in the last one that began.
  void set_moving(bool outside) noexcept;
  void set_failed(std::string_view reason) noexcept;

  int descriptor() const noexcept { return memory_.get(); }
  // Leaves the page to the parent, in a forked child.
  void release_after_fork() noexcept { memory_.reset(); }
  // Unmaps the page; nothing may be published after that.
  void release() noexcept;

 private:
  class Update;

  UniqueFd memory_;
  StatusPage* page_ = nullptr;
};

// Returns the page behind a descriptor, as it was at one moment; nullopt if it is none. The bytes
// are not trusted: what is returned is in range, and its texts are printable ASCII.
std::optional<StatusPage> read_status(int descriptor);

// Returns the present time as in StatusPage::Current::since, to a few milliseconds; cheap.
std::uint64_t coarse_now() noexcept;

}  // namespace gradwire::exec
