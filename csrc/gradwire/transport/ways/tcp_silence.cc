#include "gradwire/transport/ways/tcp_silence.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <limits>

namespace gradwire::transport {
namespace {

// Linux's struct tcp_info, as far as it is used. That of <netinet/tcp.h> is older, and that of
// <linux/tcp.h> excludes the other header.
struct TcpInfo {
  std::uint8_t states[8];
  std::uint32_t timers[2];
  std::uint32_t snd_mss, rcv_mss;
  std::uint32_t unacked;
  std::uint32_t counts_and_sends[6];
  std::uint32_t last_data_recv, last_ack_recv;  // milliseconds ago
  std::uint32_t windows_and_times[11];
  std::uint64_t pacing_rates[2];
  std::uint64_t bytes_acked;
  // What follows is 0 on old kernels; snd_wnd came with Linux 5.4.
  std::uint64_t bytes_received;
  std::uint32_t segments[2];
  std::uint32_t notsent_bytes;
  std::uint32_t least_time_and_segments[3];
  std::uint64_t rate_and_times[4];
  std::uint32_t delivered[2];
  std::uint64_t bytes_sent[2];
  std::uint32_t odd_segments[3];
  std::uint32_t snd_wnd;
};
static_assert(sizeof(TcpInfo) == 232);
constexpr std::size_t kNeeded = offsetof(TcpInfo, bytes_received);

// Bytes that could be sent, and are not, wait for a route: that of an interface that is down.
bool lacks_route(const TcpInfo& info) {
  return info.unacked == 0 && info.notsent_bytes > 0 && info.snd_wnd >= info.snd_mss &&
         info.snd_wnd > 0;
}

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
  if (size < kNeeded) return std::nullopt;  // an old kernel
  const auto milliseconds = std::min(info.last_ack_recv, info.last_data_recv);
  return TcpSilence{info.bytes_acked, info.unacked > 0 || lacks_route(info), 1e-3 * milliseconds};
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
