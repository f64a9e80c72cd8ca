#include "gradwire/transport/tcp_traffic.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <ctime>

#include "gradwire/base/error.h"
#include "gradwire/transport/quantity.h"
#include "gradwire/transport/settings_reader.h"
#include "gradwire/transport/socket.h"

namespace gradwire::transport {
namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(1);

// Returns the minute of the day of "08:00"; up to 24:00.
int parse_minute(std::string_view text) {
  const auto number = [&](std::string_view digits) {
    int value = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    const bool whole = error == std::errc() && end == digits.data() + digits.size();
    return whole && digits.size() == 2 ? value : -1;
  };
  const int hour = number(text.substr(0, 2)),
            minute = text.size() == 5 ? number(text.substr(3)) : -1;
  const int both = 60 * hour + minute;
  if (hour < 0 || minute < 0 || minute > 59 || both > RateOfDay::kMinutes || text[2] != ':')
    throw InvalidArgument(str_cat("'", text, "' is no time of day"));
  return both;
}

bool has_unsent(int socket) noexcept {
  int bytes = 0;
  return ::ioctl(socket, SIOCOUTQNSD, &bytes) == 0 && bytes > 0;
}

void set_rate(int socket, double bits) noexcept {
  const unsigned long bytes =
      bits == RateOfDay::kNoLimit ? ~0UL : static_cast<unsigned long>(bits / 8);
  ::setsockopt(socket, SOL_SOCKET, SO_MAX_PACING_RATE, &bytes, sizeof bytes);
}

}  // namespace

RateOfDay::RateOfDay(std::string_view spec) try {
  for (std::size_t at = 0; at <= spec.size();) {
    const std::size_t end = std::min(spec.find(',', at), spec.size());
    const std::string_view item = spec.substr(at, end - at);
    if (item.find('=') != item.npos)
      windows_.push_back(parse_window(item));
    else if (usual_ != kNoLimit)
      throw InvalidArgument(str_cat("'", item, "' is a second rate without a time"));
    else
      usual_ = parse_quantity(item, kRate);
    at = end + 1;
  }
} catch (const InvalidArgument& error) {
  throw InvalidArgument(
      str_cat("rate '", spec, "': ", error.what(), "; say 200mbit or 200mbit,08:00-18:00=50mbit"));
}

RateOfDay::Window RateOfDay::parse_window(std::string_view text) {
  const std::size_t equals = text.find('=');
  const std::string_view when = text.substr(0, equals);
  const std::size_t dash = std::min(when.find('-'), when.size());
  const std::string_view until = dash == when.size() ? "" : when.substr(dash + 1);
  return {parse_minute(when.substr(0, dash)), parse_minute(until),
          parse_quantity(text.substr(equals + 1), kRate)};
}

double RateOfDay::at_minute(int minute) const noexcept {
  const auto holds = [&](const Window& each) {
    const bool begun = minute >= each.from, before_end = minute < each.until;
    return each.from <= each.until ? begun && before_end : begun || before_end;
  };
  const auto found = std::ranges::find_if(windows_, holds);
  return found == windows_.end() ? usual_ : found->rate;
}

double RateOfDay::now() const noexcept {
  if (windows_.empty()) return usual_;
  const std::time_t seconds = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&seconds, &local);
  return at_minute(60 * local.tm_hour + local.tm_min);
}

TcpTraffic::TcpTraffic(const Settings& given) {
  const SettingsReader reader(given);
  if (const std::string rate = reader.text("GRADWIRE_RATE"); !rate.empty()) rate_ = RateOfDay(rate);
  congestion_ = reader.text("GRADWIRE_TCP_CONGESTION");
  reader.number(kTrafficClass.name, 0, 255, traffic_class_);
}

void TcpTraffic::add(int socket) {
  if (!is_tcp_socket(socket)) return;
  set_options(socket);
  std::lock_guard lock(mutex_);
  shares_[socket] = {};
}

void TcpTraffic::set_options(int socket) const {
  const auto length = static_cast<socklen_t>(congestion_.size());
  if (length > 0 && ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, congestion_.data(), length))
    throw InvalidArgument(system_message(
        str_cat("GRADWIRE_TCP_CONGESTION='", congestion_, "' is not to be had"), errno));
  if (traffic_class_ < 0) return;
  // A socket of IPv6 may carry IPv4, so each is told; the one that does not concern it may fail.
  ::setsockopt(socket, IPPROTO_IP, IP_TOS, &traffic_class_, sizeof traffic_class_);
  ::setsockopt(socket, IPPROTO_IPV6, IPV6_TCLASS, &traffic_class_, sizeof traffic_class_);
}

void TcpTraffic::remove(int socket) noexcept {
  std::lock_guard lock(mutex_);
  shares_.erase(socket);
}

// The kernel sends what a socket has taken at the socket's own pace. So one that begins to send
// takes of the others at once, and one that has sent all gives its part back at the next look.
void TcpTraffic::divide(int socket) {
  std::lock_guard lock(mutex_);
  const auto own = shares_.find(socket);
  if (own == shares_.end()) return;
  const Clock::time_point now = Clock::now();
  if (own->second.sends && now - divided_ < kBetweenLooks) return;
  divided_ = now;
  int senders = 0;
  for (auto& [each, share] : shares_) {
    share.sends = each == socket || has_unsent(each);
    senders += share.sends;
  }
  const double part = rate_.now() / senders;
  for (auto& [each, share] : shares_) {
    if (!share.sends || share.rate == part) continue;
    set_rate(each, part);
    share.rate = part;
  }
}

std::vector<std::string> TcpTraffic::describe() const {
  std::vector<std::string> all;
  if (!congestion_.empty()) all.push_back("congestion control " + congestion_);
  if (traffic_class_ >= 0) all.push_back(str_cat("traffic class ", traffic_class_));
  if (const double bits = rate_.now(); bits != RateOfDay::kNoLimit)
    all.push_back(str_cat("at most ", bits / 1e6, " Mbit/s a rank now"));
  return all;
}

}  // namespace gradwire::transport
