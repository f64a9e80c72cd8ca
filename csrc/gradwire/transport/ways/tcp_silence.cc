#include "gradwire/transport/ways/tcp_silence.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <limits>

namespace gradwire::transport {
namespace {

// Linux's struct tcp_info, as far as it is used. That of <netinet/tcp.h> is older, and that of
// <linux/tcp.h> excludes the other header.
struct TcpInfo {
  std::uint8_t states[8];
  std::uint32_t timers_and_sizes[4];
  std::uint32_t unacked;
  std::uint32_t counts_and_sends[6];
  std::uint32_t last_data_recv, last_ack_recv;  // milliseconds ago
  std::uint32_t windows_and_times[11];
  std::uint64_t pacing_rates[2];
  std::uint64_t bytes_acked;
};
static_assert(sizeof(TcpInfo) == 128);

int option(int socket, int level, int name) noexcept {
  int value = 0;
  socklen_t size = sizeof value;
  return ::getsockopt(socket, level, name, &value, &size) == 0 ? value : 0;
}

}  // namespace

std::optional<TcpSilence> silence_of(int socket) noexcept {
  TcpInfo info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;
  if (size < sizeof info) return std::nullopt;  // an old kernel
  const auto milliseconds = std::min(info.last_ack_recv, info.last_data_recv);
  return TcpSilence{info.bytes_acked, info.unacked > 0, 1e-3 * milliseconds};
}

double seconds_to_dead(int socket) noexcept {
  if (option(socket, SOL_SOCKET, SO_KEEPALIVE) == 0) return std::numeric_limits<double>::infinity();
  const int idle = option(socket, IPPROTO_TCP, TCP_KEEPIDLE);
  return idle + 1.0 * option(socket, IPPROTO_TCP, TCP_KEEPINTVL) *
                    option(socket, IPPROTO_TCP, TCP_KEEPCNT);
}

double TcpStall::seconds(int socket, Time now) noexcept {
  const auto found = silence_of(socket);
  if (!found || !found->awaits) {
    since_.reset();
    return 0;
  }
  if (!since_ || found->acknowledged != acknowledged_) since_ = now;
  acknowledged_ = found->acknowledged;
  return std::chrono::duration<double>(now - *since_).count();
}

}  // namespace gradwire::transport
