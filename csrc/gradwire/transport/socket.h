// Socket functions of all links: exchanges at set-up with a deadline, socket options, epoll.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "gradwire/base/error.h"
#include "gradwire/base/fd.h"
#include "gradwire/base/types.h"
#include "gradwire/base/wait_limit.h"
#include "gradwire/transport/connection.h"

namespace gradwire::transport {

// Names a link in errors.
struct LinkId {
  std::string_view transport;
  Rank rank = -1;
  Rank peer = -1;
};

// Returns "rank 0: shm link to rank 1: <what>".
std::string describe(const LinkId& link, const std::string& what);
[[noreturn]] void throw_transport_error(const LinkId& link, const std::string& what);
// Returns call(). Throws TransportError where libcrypto fails in it.
template <typename Call>
auto sealing(const LinkId& link, Call call) try {
  return call();
} catch (const Error& error) {
  throw_transport_error(link, error.what());
}

// Waits until `socket` is ready for `events` (POLLIN, POLLOUT). Throws Timeout, which names the
// peer.
void wait_ready(int socket, short events, const LinkId& link, const WaitLimit& wait_limit);

// Send and receive all of `data`. Over a sealed stream, each receive_all() must match one
// send_all() of the same size. Throw Timeout or TransportError, which name the peer.
void send_all(const Stream& to, ConstBytes data, const LinkId& link, const WaitLimit& wait_limit);
void receive_all(const Stream& from, Bytes data, const LinkId& link, const WaitLimit& wait_limit);

// The same for one value, as its bytes lie in memory. Sends at once: it must fit into the buffer of
// a fresh socket.
template <typename Value>
void send_value(const Stream& to, const Value& value, const LinkId& link) {
  send_all(to, std::as_bytes(std::span(&value, 1)), link, Deadline::after(0));
}
template <typename Value>
Value receive_value(const Stream& from, const LinkId& link, const WaitLimit& wait_limit) {
  Value value;
  receive_all(from, std::as_writable_bytes(std::span(&value, 1)), link, wait_limit);
  return value;
}

bool is_unix_socket(int socket);
bool is_tcp_socket(int socket);

// Makes small messages leave at once (TCP_NODELAY); does nothing where the socket is not TCP.
// Whoever made the socket has set keep-alive and TCP_USER_TIMEOUT, which reveal a dead host
// (`_bootstrap/keepalive.py`).
void set_no_delay(int socket);

UniqueFd make_epoll();
void watch(int epoll, int socket, std::uint32_t events, Rank peer);
void unwatch(int epoll, int socket) noexcept;

// Returns whether errno's value only means "try again later", not that the connection has ended.
bool would_block(int error) noexcept;

}  // namespace gradwire::transport
