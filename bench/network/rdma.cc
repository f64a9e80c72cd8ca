// How fast a transport carries messages between two processes, for rdma.py:
//
//   bench_rdma bandwidth TRANSPORT DEVICE BYTES MESSAGES   MiB/s, from user memory into user memory
//   bench_rdma latency TRANSPORT DEVICE BYTES ROUNDS       us, half of the median round trip
//
// prints one number. The processes are this one and a fork of it; or, with `listen PORT` at the end
// of the one and `connect HOST PORT` of the other, two machines'. Both poll without rest where
// there are two processors. DEVICE is that of rdma.
#include <netdb.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gradwire/base/deadline.h"
#include "gradwire/base/error.h"
#include "gradwire/transport/socket.h"
#include "gradwire/transport/transport.h"

namespace {

using namespace gradwire;
using transport::Transport;
using Clock = std::chrono::steady_clock;

constexpr double kPatience = 60;     // seconds
constexpr int kTriesPerLook = 1000;  // at the time
constexpr int kTries = 100;
constexpr int kYields = 20;
constexpr int kNapMilliseconds = 100;

struct EnvironmentVariable {
  std::string what, transport, device;
  std::size_t bytes = 0;
  int count = 0;
};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// --- the socket between the two

struct Addresses {
  addrinfo* list = nullptr;
  Addresses(const char* host, const char* port) {
    addrinfo hints{};
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE;
    const int error = ::getaddrinfo(host, port, &hints, &list);
    if (error != 0) throw Error(std::string("getaddrinfo: ") + ::gai_strerror(error));
  }
  ~Addresses() { ::freeaddrinfo(list); }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
};

UniqueFd stream() {
  UniqueFd made(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!made.valid()) throw Error(system_message("socket", errno));
  return made;
}

UniqueFd listen_at(const char* host, const char* port) {
  const Addresses own(host, port);
  UniqueFd listener = stream();
  const int yes = 1;
  ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (::bind(listener.get(), own.list->ai_addr, own.list->ai_addrlen) != 0 ||
      ::listen(listener.get(), 1) != 0)
    throw Error(system_message("listen", errno));
  return listener;
}

UniqueFd accept_one(const UniqueFd& listener) {
  transport::wait_ready(listener.get(), POLLIN, {"bench", 0, 1}, Deadline::after(kPatience));
  UniqueFd made(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!made.valid()) throw Error(system_message("accept", errno));
  return made;
}

// The other end may not listen yet.
UniqueFd connect_to(const char* host, const char* port) {
  const Addresses other(host, port);
  const Deadline deadline = Deadline::after(kPatience);
  while (true) {
    UniqueFd made = stream();
    if (::connect(made.get(), other.list->ai_addr, other.list->ai_addrlen) == 0) return made;
    if (deadline.passed()) throw Error(system_message("connect", errno));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

std::string port_of(const UniqueFd& listener) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return std::to_string(ntohs(address.sin_port));
}

// --- messages in frames, copied into staging and out of it

// One processor is the device's too, if the kernel emulates it: who polls there without rest takes
// it away. A communicator tries some times, yields some times, then sleeps on the doorbell.
const bool kRests = std::thread::hardware_concurrency() < 2;

// Whether it slept.
template <typename Done>
bool rest(Transport& link, int tries, Done done) {
  if (tries < kTries) return false;
  if (tries < kTries + kYields) {
    ::sched_yield();
    return false;
  }
  link.arm();
  pollfd bell{link.doorbell(), POLLIN, 0};
  if (!done()) ::poll(&bell, 1, kNapMilliseconds);
  link.disarm();
  return true;
}

template <typename Attempt>
void wait_for(Transport& link, Attempt attempt) {
  const Deadline deadline = Deadline::after(kPatience);
  bool found = false;
  const auto done = [&] {
    link.flush();
    return found = found || attempt();
  };
  for (int tries = 1; !done(); ++tries) {
    const bool slept = kRests && rest(link, tries, done);
    if ((slept || tries % kTriesPerLook == 0) && deadline.passed())
      throw Timeout("the other process says nothing", kNoPeer);
  }
}

void send_frame(Transport& link, Rank peer, ConstBytes frame) {
  const std::array peers{peer};
  Bytes staging;
  wait_for(link, [&] {
    staging = link.reserve(peers, frame.size());
    return staging.data() != nullptr;
  });
  std::memcpy(staging.data(), frame.data(), frame.size());
  link.commit(frame.size());
}

void receive_frame(Transport& link, Rank peer, Bytes into) {
  std::optional<ConstBytes> message;
  wait_for(link, [&] {
    message = link.peek(peer);
    return message.has_value();
  });
  if (message->size() != into.size()) throw Error("a frame of another length");
  std::memcpy(into.data(), message->data(), into.size());
  link.release(peer);
}

// Calls `pass` with each frame of a message.
template <typename Span, typename Pass>
void in_frames(Span message, Pass pass) {
  for (std::size_t at = 0; at < message.size(); at += kUsualFrame)
    pass(message.subspan(at, std::min(kUsualFrame, message.size() - at)));
}

// --- what is measured; rank 1 sends first and knows the result

// Seconds until the last of so many messages was read.
double stream_messages(Transport& link, Rank rank, std::vector<std::byte>& memory, int count) {
  const Rank peer = 1 - rank;
  std::array<std::byte, 1> over{};
  const auto begin = Clock::now();
  for (int i = 0; i < count; ++i) {
    if (rank == 1)
      in_frames(ConstBytes(memory), [&](ConstBytes frame) { send_frame(link, peer, frame); });
    else
      in_frames(Bytes(memory), [&](Bytes frame) { receive_frame(link, peer, frame); });
  }
  if (rank == 1)
    receive_frame(link, peer, over);
  else
    send_frame(link, peer, over);
  return seconds_since(begin);
}

double bandwidth(Transport& link, Rank rank, const EnvironmentVariable& of) {
  constexpr double kMiB = 1 << 20;
  std::vector<std::byte> memory(of.bytes, std::byte{7});
  stream_messages(link, rank, memory, std::max(1, of.count / 4));
  const double seconds = stream_messages(link, rank, memory, of.count);
  return static_cast<double>(of.bytes) * of.count / kMiB / seconds;
}

double latency(Transport& link, Rank rank, const EnvironmentVariable& of) {
  const Rank peer = 1 - rank;
  std::vector<std::byte> memory(of.bytes);
  std::vector<double> trips;
  for (int i = 0; i < of.count + of.count / 4; ++i) {
    const auto begin = Clock::now();
    if (rank == 1) send_frame(link, peer, memory);
    receive_frame(link, peer, memory);
    if (rank == 0) send_frame(link, peer, memory);
    if (i >= of.count / 4) trips.push_back(seconds_since(begin));
  }
  const auto middle = trips.begin() + static_cast<std::ptrdiff_t>(trips.size() / 2);
  std::nth_element(trips.begin(), middle, trips.end());
  return *middle * 1e6 / 2;
}

std::shared_ptr<transport::TransportContext> open_device(const std::string& device) {
  const auto opened = transport::open_transport("rdma", {{"GRADWIRE_IB_HCA", "=" + device}});
  if (!opened.usable()) throw InvalidArgument(opened.why_not);
  return opened.context;
}

void run(const EnvironmentVariable& setting, Rank rank, UniqueFd socket) {
  transport::LinkOptions options;
  options.rank = rank;
  options.size = 2;
  if (setting.transport == "rdma") options.context = open_device(setting.device);
  const auto link = transport::make_transport(setting.transport, options);
  link->adopt(std::move(socket), 1 - rank, kPatience);
  const double result =
      setting.what == "latency" ? latency(*link, rank, setting) : bandwidth(*link, rank, setting);
  wait_for(*link, [&] { return link->flush(); });
  if (rank == 1) std::printf("%.4f\n", result);
}

int run_both(const EnvironmentVariable& setting) {
  UniqueFd listener = listen_at("127.0.0.1", "0");
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    run(setting, 0, accept_one(listener));
    return 0;
  }
  run(setting, 1, connect_to("127.0.0.1", port_of(listener).c_str()));
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** words) try {
  if (count < 6) throw InvalidArgument("see the head of bench/network/rdma.cc");
  const EnvironmentVariable setting{words[1], words[2], words[3], std::stoull(words[4]),
                                    std::stoi(words[5])};
  const std::string where = count > 6 ? words[6] : "";
  if (where.empty()) return run_both(setting);
  if (where == "listen" && count == 8)
    run(setting, 0, accept_one(listen_at(nullptr, words[7])));
  else if (where == "connect" && count == 9)
    run(setting, 1, connect_to(words[7], words[8]));
  else
    throw InvalidArgument("see the head of bench/network/rdma.cc");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_rdma: %s\n", error.what());
  return 1;
}
