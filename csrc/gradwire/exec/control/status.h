// Status: a page of memory on which a rank publishes what it does, for anybody of the same user to
// read (status_scan.h), even while the rank's process is stopped or never lets go of a lock.
//
// The page is a sealed memfd, which is found by its name among a process's descriptors; nothing has
// to be listened to, and nothing is left behind. A forked child inherits the page: `pid` says whose
// it is.
//
// One thread writes at a time, the driver. A version that is odd during an update (a seqlock, with
// release stores instead of fences) tells readers to look again.
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
  kOutside = 1,  // of gradwire: the caller computes, or has lost its way
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
  std::uint64_t tag;  // of the job: the same on its ranks, another for a job of the same name
  std::array<char, 64> job;
  std::array<char, 192> about;  // on what the ranks joined: interface, secret

  // What changes, in words. `spec` belongs to the call whose fingerprint is `spec_of`.
  std::uint64_t version;
  struct Now {
    std::uint64_t activity;
    std::uint64_t since;  // it does so, or has not moved: CLOCK_MONOTONIC, nanoseconds
    std::uint64_t calls;  // begun so far; the present or latest one is call `calls - 1`
    std::uint64_t fingerprint;
    std::uint64_t message;  // sent or received: number of it between the two ranks
    std::uint64_t peer;     // waited for; all ones: none, or any
    std::uint64_t reads;    // 1: the peer must read what was sent to it; 0: it must send
    std::uint64_t round;
    std::uint64_t segment;
    std::uint64_t spec_of;
    std::array<std::uint64_t, 32> spec;  // text: what is called, or why it failed
  } now;

  Activity activity() const noexcept { return static_cast<Activity>(now.activity); }
  Rank peer() const noexcept { return static_cast<Rank>(now.peer); }
  // The text of the present call; empty where it was not written down.
  std::string spec() const;
};

// Where a rank stands that waits.
struct Wait {
  Activity activity = Activity::kCall;
  std::uint32_t number = 0;  // of the call, or of the message between the two ranks
  Rank peer = kNoPeer;       // none, or any
  bool reads = false;        // the peer must read what was sent to it; else it must send
  std::uint32_t round = 0;
  std::uint32_t segment = 0;
  std::uint32_t fingerprint = 0;
  std::string spec;
};

class Status {
 public:
  // Without memfds the page is this process's own, and nobody finds it.
  explicit Status(const Identity& identity);
  ~Status() { let_go(); }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;

  // Nanoseconds each: for every call.
  void begin(std::uint32_t call, std::uint32_t fingerprint, std::uint64_t now) noexcept;
  void end() noexcept { moves(/*outside=*/true); }

  void waits(const Wait& wait, std::uint64_t since) noexcept;
  // It moves again; `outside` of any call, or in the one that began last.
  void moves(bool outside) noexcept;
  void fails(std::string_view reason) noexcept;

  int descriptor() const noexcept { return memory_.get(); }
  // In a forked child: leaves the page to the parent.
  void let_go_in_child() noexcept { memory_.reset(); }
  // Takes the page away; nothing may be published after it.
  void let_go() noexcept;

 private:
  class Update;

  UniqueFd memory_;
  StatusPage* page_ = nullptr;
};

// The page behind a descriptor, all of one moment; nullopt where it is none. Foreign bytes: what it
// returns is in range, and its texts are printable ASCII.
std::optional<StatusPage> read_status(int descriptor);

// The present moment, as in StatusPage::Now::since; a few milliseconds coarse, and cheap.
std::uint64_t coarse_now() noexcept;

}  // namespace gradwire::exec
