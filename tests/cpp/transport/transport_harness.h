// Ranks joined by sockets inside one test, and waits that end.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradwire/base/deadline.h"
#include "gradwire/base/error.h"
#include "gradwire/base/fork.h"
#include "gradwire/transport/emulated_link.h"
#include "gradwire/transport/rdma/rdma_devices.h"
#include "gradwire/transport/transport.h"

namespace gradwire::transport {

#ifdef __SANITIZE_THREAD__
inline constexpr bool kForkWorks = false;  // ThreadSanitizer does not follow a fork with threads
#else
inline constexpr bool kForkWorks = true;
#endif

inline constexpr double kTestSeconds = 60;
using Ends = std::pair<UniqueFd, UniqueFd>;
using Transports = std::vector<std::unique_ptr<Transport>>;

inline Ends unix_ends() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw Error(system_message("socketpair", errno));
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

inline Ends tcp_ends() {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* where = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof address;
  UniqueFd near(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::bind(listener.get(), where, size) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), where, &size) != 0 || ::connect(near.get(), where, size) != 0)
    throw Error(system_message("loopback", errno));
  return {std::move(near), UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))};
}

inline Ends ends_for(std::string_view transport) {
  const auto kinds = transport_kinds();
  const auto kind = std::ranges::find(kinds, transport, &TransportKind::name);
  return (*kind)->sockets == Sockets::kUnix ? unix_ends() : tcp_ends();
}

// Runs every job on a thread of its own; rethrows the first exception after all have ended.
template <typename Job>
void run_threads(int count, Job job) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(count));
  std::vector<std::jthread> threads;
  for (int i = 0; i < count; ++i)
    threads.emplace_back([&, i] {
      try {
        job(i);
      } catch (...) {
        errors[static_cast<std::size_t>(i)] = std::current_exception();
      }
    });
  threads.clear();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

// So fast that it holds up no test, and yet messages wait for their time.
inline std::shared_ptr<EmulatedLink> fast_link() {
  return std::make_shared<EmulatedLink>("10gbit,5us");
}

// The library by which a program's rdma links are made; another one where it is a fake.
inline std::string rdma_library = Verbs::kLibrary;

// This process's.
inline std::shared_ptr<RdmaDevices> rdma_devices() {
  static std::shared_ptr<RdmaDevices> devices;
  static std::uint32_t made_after = 0;
  if (!devices || made_after != forks())
    devices = std::make_shared<RdmaDevices>(RdmaSettings{.library = rdma_library});
  made_after = forks();
  return devices;
}

// What the transport's links need, where they need anything.
inline std::shared_ptr<TransportContext> context_for(std::string_view transport) {
  if (transport == "rdma") return rdma_devices();
  if (transport == "emulated") return fast_link();
  return nullptr;
}

// Whether a program's links go over sealed sockets.
inline bool links_are_sealed = false;

// One end of a socket, with keys where links are sealed.
inline Connection with_keys(UniqueFd socket, bool first) {
  if (!links_are_sealed) return socket;
  const crypto::Key one(crypto::bytes_of("0123456789abcdef0123456789abcdef"));
  const crypto::Key other(crypto::bytes_of("fedcba9876543210fedcba9876543210"));
  return {std::move(socket),
          std::make_shared<crypto::Seal>(crypto::Cipher::kAes128Gcm, first ? one : other,
                                         first ? other : one)};
}

// A full mesh of `size` ranks of one transport.
inline Transports connect(std::string_view name, int size, LinkOptions options = {}) {
  const auto count = static_cast<std::size_t>(size);
  std::vector<std::vector<UniqueFd>> sockets(count);
  for (auto& row : sockets) row.resize(count);
  for (std::size_t a = 0; a < count; ++a)
    for (std::size_t b = a + 1; b < count; ++b)
      std::tie(sockets[a][b], sockets[b][a]) = ends_for(name);
  Transports mesh(count);
  std::vector<std::shared_ptr<TransportContext>> contexts(count, options.context);
  if (name == "emulated" || !options.context)  // each rank has a NIC of its own
    for (auto& context : contexts) context = context_for(name);
  run_threads(size, [&](Rank rank) {
    LinkOptions mine = options;
    mine.rank = rank;
    mine.size = size;
    mine.context = contexts[static_cast<std::size_t>(rank)];
    auto& self = mesh[static_cast<std::size_t>(rank)] = make_transport(name, mine);
    for (Rank peer = 0; peer < size; ++peer)
      if (peer != rank)
        self->adopt(
            with_keys(
                std::move(sockets[static_cast<std::size_t>(rank)][static_cast<std::size_t>(peer)]),
                rank < peer),
            peer, kTestSeconds);
  });
  return mesh;
}

inline bool rings(const Transport& transport, int milliseconds) {
  pollfd bell{transport.doorbell(), POLLIN, 0};
  return ::poll(&bell, 1, milliseconds) == 1;
}

// Sleeps on the doorbell until `look` finds what it looks for; pushes out what is pending
// meanwhile.
template <typename Look>
void wait_until(Transport& transport, Look look) {
  const Deadline deadline = Deadline::after(kTestSeconds);
  const auto done = [&] {
    transport.flush();
    return look();
  };
  while (!done()) {
    transport.arm();
    const bool found = done();
    if (!found && !rings(transport, deadline.milliseconds_left(60'000)) && deadline.passed())
      throw Timeout("the test waited too long", kNoPeer);
    transport.disarm();
    if (found) return;
  }
}

inline void flush_all(Transport& transport) {
  wait_until(transport, [&] { return transport.flush(); });
}

// The same bytes for the same seed, different ones for another.
inline std::byte pattern(std::size_t seed, std::size_t index) {
  return static_cast<std::byte>((seed * 167 + index * 31 + index / 251) & 0xff);
}

inline void fill(Bytes bytes, std::size_t seed) {
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(seed, i);
}

// `first` is the index of the first byte in the message that fill() made.
inline bool matches(ConstBytes bytes, std::size_t seed, std::size_t first = 0) {
  for (std::size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] != pattern(seed, first + i)) return false;
  return true;
}

// False when there is no room.
inline bool try_send(Transport& transport, std::span<const Rank> peers, std::size_t bytes,
                     std::size_t seed) {
  const Bytes staging = transport.reserve(peers, bytes);
  if (staging.data() == nullptr) return false;
  fill(staging, seed);
  transport.commit(bytes);
  return true;
}

inline void send(Transport& transport, const std::vector<Rank>& peers, std::size_t bytes,
                 std::size_t seed) {
  wait_until(transport, [&] { return try_send(transport, peers, bytes, seed); });
}

// Waits for the next message of `peer`, checks it and releases it.
inline void expect_message(Transport& transport, Rank peer, std::size_t bytes, std::size_t seed) {
  wait_until(transport, [&] { return transport.peek(peer).has_value(); });
  const ConstBytes message = *transport.peek(peer);
  EXPECT_EQ(message.size(), bytes) << "message " << seed << " from rank " << peer;
  EXPECT_TRUE(matches(message, seed)) << "message " << seed << " from rank " << peer;
  transport.release(peer);
}

// Waits for the end of `peer`; nothing else may arrive before it.
inline void expect_end(Transport& transport, Rank peer) {
  try {
    wait_until(transport, [&] { return transport.peek(peer).has_value(); });
    ADD_FAILURE() << "a message where the end was due";
  } catch (const TransportError& error) {
    EXPECT_EQ(error.peer(), peer);
    EXPECT_NE(std::string(error.what()).find("rank " + std::to_string(peer)), std::string::npos);
  }
}

}  // namespace gradwire::transport
