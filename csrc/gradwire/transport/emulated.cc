// emulated: tcp on one host, where a message is shown no sooner than a NIC of a given rate and
// latency would have delivered it (EmulatedLink). The bytes are sent at once. Each message is
// followed by its Flight, from which the receiver computes by its own clock when to show it. So no
// sender paces itself, a late reader is not delayed twice, and a timer in the doorbell wakes a
// sleeping reader.
#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/transport/emulated_link.h"
#include "gradwire/transport/socket.h"
#include "gradwire/transport/transport.h"

namespace gradwire::transport {
namespace {

using Flight = EmulatedLink::Flight;
using Time = EmulatedLink::Time;
constexpr std::string_view kName = "emulated";

LinkOptions with_room_for_a_flight(LinkOptions options) {
  options.max_message += sizeof(Flight);
  options.context = nullptr;  // tcp has one of its own
  return options;
}

ConstBytes without_flight(ConstBytes message) {
  return message.first(message.size() - sizeof(Flight));
}

// A timer for epoll: watched edge-triggered, it rings once at the time that was set.
class Alarm {
 public:
  Alarm() : fd_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
    if (!fd_.valid()) throw Error(system_message("timerfd_create", errno));
  }
  int get() const noexcept { return fd_.get(); }

  // Rings at `when` or before. It replaces a setting that is later, or has rung.
  void ring_by(Time when, Time now) {
    if (set_for_ > now && set_for_ <= when) return;
    using std::chrono::nanoseconds;
    using std::chrono::seconds;
    const auto since_boot = when.time_since_epoch();
    const auto whole = std::chrono::floor<seconds>(since_boot);
    itimerspec spec{};
    spec.it_value.tv_sec = whole.count();
    spec.it_value.tv_nsec = nanoseconds(since_boot - whole).count();
    if (::timerfd_settime(fd_.get(), TFD_TIMER_ABSTIME, &spec, nullptr) != 0)
      throw Error(system_message("timerfd_settime", errno));
    set_for_ = when;
  }

 private:
  UniqueFd fd_;
  Time set_for_;
};

class EmulatedTransport final : public Transport {
 public:
  explicit EmulatedTransport(const LinkOptions& options);

  std::string_view name() const noexcept override { return kName; }
  std::size_t max_message() const noexcept override { return tcp_->max_message() - sizeof(Flight); }
  void offer(Connection connection, Rank peer) override {
    tcp_->offer(std::move(connection), peer);
  }
  void complete(const WaitLimit& wait_limit) override { tcp_->complete(wait_limit); }
  std::vector<Rank> peers() const override { return tcp_->peers(); }
  Bytes reserve(std::span<const Rank> peers, std::size_t bytes) override;
  void commit(std::size_t bytes) override;
  bool flush() override { return tcp_->flush(); }
  bool is_flushed(Rank peer) const override { return tcp_->is_flushed(peer); }
  std::optional<ConstBytes> peek(Rank peer) override;
  void release(Rank peer) override;
  int doorbell() const noexcept override { return bell_.get(); }
  void arm() override;
  void disarm() override { tcp_->disarm(); }

 private:
  // How far this rank has got with the message in front.
  struct Front {
    bool received = false;  // `at` is known: when all of it is received
    bool shown = false;
    Time at;
  };
  bool has_arrived(Rank peer, ConstBytes message);

  Rank rank_;
  std::shared_ptr<EmulatedLink> link_;
  std::unique_ptr<Transport> tcp_;
  std::vector<Front> fronts_;
  Bytes open_;  // the open reservation, without its flight
  std::size_t copies_ = 0;
  Alarm alarm_;
  UniqueFd bell_;  // watches tcp's doorbell and the alarm
};

EmulatedTransport::EmulatedTransport(const LinkOptions& options)
    : rank_(options.rank),
      link_(std::dynamic_pointer_cast<EmulatedLink>(options.context)),
      tcp_(make_transport("tcp", with_room_for_a_flight(options))),
      fronts_(at(options.size)),
      bell_(make_epoll()) {
  if (!link_)
    throw InvalidArgument("an emulated link needs a rate: set GRADWIRE_LINK, to 1gbit,100us say");
  watch(bell_.get(), tcp_->doorbell(), EPOLLIN, kNoPeer);
  watch(bell_.get(), alarm_.get(), EPOLLIN | EPOLLET, kNoPeer);
}

Bytes EmulatedTransport::reserve(std::span<const Rank> peers, std::size_t bytes) {
  const Bytes room = tcp_->reserve(peers, bytes + sizeof(Flight));
  open_ = room.data() == nullptr ? Bytes{} : room.first(bytes);
  copies_ = peers.size();
  return open_;
}

void EmulatedTransport::commit(std::size_t bytes) {
  if (open_.data() == nullptr || bytes > open_.size())
    throw InvalidArgument(str_cat("commit() of ", bytes, " bytes exceeds the open reservation"));
  const Flight flight = link_->send(bytes, copies_);
  std::memcpy(open_.data() + bytes, &flight, sizeof flight);
  open_ = {};
  tcp_->commit(bytes + sizeof flight);
}

std::optional<ConstBytes> EmulatedTransport::peek(Rank peer) {
  const auto message = tcp_->peek(peer);
  if (!message || !has_arrived(peer, *message)) return std::nullopt;
  return without_flight(*message);
}

// Returns whether a message may be shown. Messages enter the NIC in the order in which their first
// bits arrive.
bool EmulatedTransport::has_arrived(Rank peer, ConstBytes message) {
  Front& front = fronts_[at(peer)];
  if (front.shown) return true;
  if (message.size() < sizeof(Flight))
    throw_transport_error({kName, rank_, peer}, "a message came without its times");
  const std::size_t bytes = message.size() - sizeof(Flight);
  Flight flight;
  std::memcpy(&flight, message.data() + bytes, sizeof flight);
  const Time now = Deadline::Clock::now();
  if (!front.received && flight.first <= now) {
    front.at = link_->receive(flight, bytes);
    front.received = true;
  }
  const Time next = front.received ? front.at : flight.first;
  front.shown = front.received && next <= now;
  if (!front.shown) alarm_.ring_by(next, now);
  return front.shown;
}

void EmulatedTransport::release(Rank peer) {
  tcp_->release(peer);
  fronts_[at(peer)] = {};
}

void EmulatedTransport::arm() {
  tcp_->arm();
  std::array<epoll_event, 2> stale;
  ::epoll_wait(bell_.get(), stale.data(), stale.size(), 0);
}

constexpr std::string_view kVariable = "GRADWIRE_LINK";
constexpr EnvironmentVariable kVariables[] = {
    {kVariable, "RATE[,LATENCY] of an emulated NIC for each rank: 1gbit,100us; one host, over tcp",
     "links as they are"}};

// tcp's, held to 1 Gbit/s and 100 µs: a rate that was asked for replaces them.
constexpr LinkCost kEmulatedCost{4e-6, 1e-4, 8e-9, 1.5e-10};

OpenedTransport open_emulated(const Settings& given) {
  const auto link = given.find(kVariable);
  if (link == given.end()) return {};
  return {.context = std::make_shared<EmulatedLink>(link->second)};
}

}  // namespace

extern constinit const TransportKind emulated_kind{
    .name = kName,
    .reach = Reach::kHost,
    .by_default = false,
    .make = [](const LinkOptions& options) -> std::unique_ptr<Transport> {
      return std::make_unique<EmulatedTransport>(options);
    },
    .open = open_emulated,
    .settings = kVariables,
    .within_host = kEmulatedCost,
    .between_hosts = kEmulatedCost,
};

}  // namespace gradwire::transport
