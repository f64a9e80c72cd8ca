// Socket functions that the links share: set-up exchanges with a deadline, options, epoll.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "gradwire/base/fd.h"
#include "gradwire/base/types.h"
#include "gradwire/base/wait_limit.h"

namespace gradwire::transport {

// The link that an error is about.
struct LinkId {
  std::string_view transport;
  Rank rank = -1;
  Rank peer = -1;
};

// "rank 0: shm link to rank 1: <what>".
std::string describe(const LinkId& link, const std::string& what);
[[noreturn]] void throw_transport_error(const LinkId& link, const std::string& what);

// Waits until `socket` is ready for `events` (POLLIN, POLLOUT); Timeout naming the peer otherwise.
void wait_ready(int socket, short events, const LinkId& link, const WaitLimit& wait_limit);

// All of `data`, or Timeout or TransportError naming the peer.
void send_all(int socket, ConstBytes data, const LinkId& link, const WaitLimit& wait_limit);
void receive_all(int socket, Bytes data, const LinkId& link, const WaitLimit& wait_limit);

bool is_unix_socket(int socket);

// Small messages leave at once; nothing where it is not TCP. Keep-alive and TCP_USER_TIMEOUT, by
// which a dead host shows, are set by whoever made the socket (`_bootstrap/keepalive.py`).
void set_no_delay(int socket);

UniqueFd make_epoll();
void watch(int epoll, int socket, std::uint32_t events, Rank peer);
void unwatch(int epoll, int socket) noexcept;

// Whether a call only found nothing yet, as opposed to a connection that has ended.
bool would_block(int error) noexcept;

}  // namespace gradwire::transport
