// What the targets share. Rank 0 is under test; rank 1, its peer, says foreign bytes.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/transport/handshake.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace gradwire::fuzz {

// A broken promise ends the process, which libFuzzer reports with the input that did it.
inline void require(bool holds) {
  if (!holds) __builtin_trap();
}

// Takes values off the front of the input; zeros when it is used up.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : rest_(std::as_bytes(std::span(data, size))) {}

  bool empty() const { return rest_.empty(); }
  ConstBytes take(std::size_t most) {
    const ConstBytes front = rest_.first(std::min(most, rest_.size()));
    rest_ = rest_.subspan(front.size());
    return front;
  }
  template <typename Number>
  Number number() {
    Number value = 0;
    const ConstBytes bytes = take(sizeof value);
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  ConstBytes rest() { return take(rest_.size()); }

 private:
  ConstBytes rest_;
};

// Foreign bytes end in an error that names rank 1, or that tells two options apart, or in none.
template <typename Body>
void expect_typed(Body body) {
  try {
    body();
  } catch (const PeerError& error) {
    require(error.peer() == 1);
  } catch (const InvalidArgument&) {
  }
}

using Ends = std::pair<UniqueFd, UniqueFd>;

inline Ends socket_pair() {
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// What does not fit the socket's buffer is not said.
inline void say(const UniqueFd& socket, ConstBytes bytes) {
  while (!bytes.empty()) {
    const ssize_t sent =
        ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return;
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
  }
}

// What rank `from` begins a link to rank `to` with.
inline std::vector<std::byte> hello_of(std::string_view kind, transport::LinkOptions options,
                                       Rank from, Rank to) {
  options.rank = from;
  auto [near, far] = socket_pair();
  transport::send_hello(near.get(), {kind, from, to}, options);
  std::vector<std::byte> hello(1024);
  const ssize_t got = ::recv(far.get(), hello.data(), hello.size(), MSG_DONTWAIT);
  require(got > 0);
  hello.resize(static_cast<std::size_t>(got));
  return hello;
}

// No descriptor may stay open: the same ones are before and after.
class NoDescriptorLeft {
 public:
  NoDescriptorLeft() : before_(open_ones()) {}
  ~NoDescriptorLeft() { require(open_ones() == before_); }
  NoDescriptorLeft(const NoDescriptorLeft&) = delete;
  NoDescriptorLeft& operator=(const NoDescriptorLeft&) = delete;

 private:
  using Descriptors = std::bitset<64>;  // an input opens fewer
  static Descriptors open_ones() {
    Descriptors open;
    for (std::size_t fd = 0; fd < open.size(); ++fd)
      open[fd] = ::fcntl(static_cast<int>(fd), F_GETFD) >= 0;
    return open;
  }
  Descriptors before_;
};

}  // namespace gradwire::fuzz
