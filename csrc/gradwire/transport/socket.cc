#include "gradwire/transport/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

int domain_of(int socket) {
  int domain = 0;
  socklen_t size = sizeof domain;
  ::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size);
  return domain;
}

void send_plain(int socket, ConstBytes data, const LinkId& link, const WaitLimit& wait_limit) {
  while (!data.empty()) {
    const ssize_t sent = ::send(socket, data.data(), data.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      data = data.subspan(static_cast<std::size_t>(sent));
    } else if (would_block(errno)) {
      wait_ready(socket, POLLOUT, link, wait_limit);
    } else {
      throw_transport_error(link, system_message("set-up failed, send", errno));
    }
  }
}

void receive_plain(int socket, Bytes data, const LinkId& link, const WaitLimit& wait_limit) {
  while (!data.empty()) {
    const ssize_t got = ::recv(socket, data.data(), data.size(), MSG_DONTWAIT);
    if (got > 0) {
      data = data.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      throw_transport_error(link, "the peer closed it while the link was made");
    } else if (would_block(errno)) {
      wait_ready(socket, POLLIN, link, wait_limit);
    } else {
      throw_transport_error(link, system_message("set-up failed, recv", errno));
    }
  }
}

}  // namespace

std::string describe(const LinkId& link, const std::string& what) {
  return str_cat("rank ", link.rank, ": ", link.transport, " link to rank ", link.peer, ": ", what);
}

void throw_transport_error(const LinkId& link, const std::string& what) {
  throw TransportError(describe(link, what), link.peer);
}

bool would_block(int error) noexcept {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

void wait_ready(int socket, short events, const LinkId& link, const WaitLimit& wait_limit) {
  pollfd waiter{socket, events, 0};
  while (::poll(&waiter, 1, wait_limit.turn_milliseconds()) <= 0) {
    wait_limit.check_interrupt();
    if (wait_limit.passed())
      throw Timeout(
          describe(link, str_cat("timed out without an answer while the link was made; is rank ",
                                 link.peer, " alive and at the same call?")),
          link.peer);
  }
}

void send_all(const Stream& to, ConstBytes data, const LinkId& link, const WaitLimit& wait_limit) {
  if (to.seal == nullptr) return send_plain(to.socket, data, link, wait_limit);
  const std::string_view plain(reinterpret_cast<const char*>(data.data()), data.size());
  const std::string sealed = sealing(link, [&] { return to.seal->records(plain); });
  send_plain(to.socket, crypto::bytes_of(sealed), link, wait_limit);
}

void receive_all(const Stream& from, Bytes data, const LinkId& link, const WaitLimit& wait_limit) {
  if (from.seal == nullptr) return receive_plain(from.socket, data, link, wait_limit);
  while (!data.empty()) {
    std::string sealed(from.seal->missing(), '\0');
    receive_plain(from.socket, std::as_writable_bytes(std::span(sealed)), link, wait_limit);
    const auto plain = sealing(link, [&] { return from.seal->opened(sealed); });
    if (!plain || plain->size() > data.size()) throw_transport_error(link, crypto::kChanged);
    data = data.subspan(plain->copy(reinterpret_cast<char*>(data.data()), plain->size()));
  }
}

bool is_unix_socket(int socket) { return domain_of(socket) == AF_UNIX; }

bool is_tcp_socket(int socket) {
  const int domain = domain_of(socket);
  return domain == AF_INET || domain == AF_INET6;
}

void set_no_delay(int socket) {
  constexpr int kOn = 1;
  if (is_tcp_socket(socket) &&
      ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &kOn, sizeof kOn) != 0)
    throw Error(system_message("setsockopt", errno));
}

UniqueFd make_epoll() {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) throw Error(system_message("epoll_create1", errno));
  return epoll;
}

void watch(int epoll, int socket, std::uint32_t events, Rank peer) {
  epoll_event event{};
  event.events = events;
  event.data.fd = peer;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event) != 0)
    throw Error(system_message("epoll_ctl", errno));
}

void unwatch(int epoll, int socket) noexcept { ::epoll_ctl(epoll, EPOLL_CTL_DEL, socket, nullptr); }

}  // namespace gradwire::transport
