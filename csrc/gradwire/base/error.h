// Everything a caller can cause is thrown as one of these; Python sees the same tree
// (gradwire.Error).
//
//   Error
//   ├── InvalidArgument   the call itself is wrong; the communicator stays usable, unless the
//   │                     error is that ranks made different calls
//   ├── ScheduleError     a schedule is malformed, or does not fit the codec or the collective
//   ├── RendezvousError   the ranks could not find or authenticate each other
//   ├── TransportError    a peer vanished or sent something impossible; peer() says which
//   ├── Timeout           a deadline passed; peer() is the rank that was waited for
//   └── Aborted           abort() or close() ended the call, or Ctrl-C did; peer() is who did it
//
// Messages say what happened, on which rank, with which peer, and what to do.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "gradwire/base/types.h"

namespace gradwire {

inline constexpr Rank kNoPeer = -1;

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InvalidArgument : public Error {
 public:
  using Error::Error;
};

class ScheduleError : public Error {
 public:
  using Error::Error;
};

class RendezvousError : public Error {
 public:
  using Error::Error;
};

// An error that one rank caused. peer() is its rank in the communicator that failed, or kNoPeer
// where it is unknown or not a member; job_peer() is its rank in the job, or kNoPeer.
class PeerError : public Error {
 public:
  PeerError(const std::string& message, Rank peer, Rank job_peer = kNoPeer, bool only_this = false)
      : Error(message), peer_(peer), job_peer_(job_peer), only_this_(only_this) {}
  Rank peer() const noexcept { return peer_; }
  Rank job_peer() const noexcept { return job_peer_; }
  // Returns whether that rank ended only this communicator, and goes on with its others.
  bool only_this_communicator() const noexcept { return only_this_; }

 private:
  Rank peer_, job_peer_;
  bool only_this_;
};

class TransportError : public PeerError {
 public:
  using PeerError::PeerError;
};

class Timeout : public PeerError {
 public:
  using PeerError::PeerError;
};

class Aborted : public PeerError {
 public:
  explicit Aborted(const std::string& message, Rank peer = kNoPeer, Rank job_peer = kNoPeer,
                   bool only_this = false)
      : PeerError(message, peer, job_peer, only_this) {}
};

// Returns the values one after the other, for messages: text as it is, numbers in decimal.
template <typename... Values>
std::string str_cat(const Values&... values) {
  std::string out;
  const auto append = [&out](const auto& value) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(value)>>)
      out += std::to_string(value);
    else
      out += value;
  };
  (append(values), ...);
  return out;
}

// Returns "what: strerror(code)", for messages.
std::string system_message(const std::string& what, int code);
// Returns "2.5 s", without the trailing zeros of to_string.
std::string seconds_text(double seconds);

}  // namespace gradwire
