// p communicators in one process, each driven by a thread of its own, joined by socket pairs.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "gradwire/exec/communicator.h"
#include "transport_harness.h"

namespace gradwire::exec {

// The most ranks of a property test. Sanitizers are slow, and find with few what there is.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kMostRanks = 4;
#else
inline constexpr int kMostRanks = 9;
#endif

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  constexpr auto kBits = [](float each) { return std::bit_cast<std::uint32_t>(each); };
  return std::ranges::equal(a, b, {}, kBits, kBits);
}

// How frames travel: none of it may change a bit.
struct Travel {
  std::string_view transport = "inproc";
  std::size_t segment_bytes = 8192;  // so that several are on their way
  bool delays = false;               // ranks come late, each to each call by its own time

  Tuning tuning() const {
    Tuning made;
    made.segment_bytes = segment_bytes;
    return made;
  }
  void delay(Rank rank, unsigned call) const {
    std::mt19937 random(call * 16 + static_cast<unsigned>(rank));
    if (delays) std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
  }
};

inline std::string_view any_transport(int pick) {
  constexpr std::string_view kAll[] = {"inproc", "shm", "tcp"};
  return kAll[pick % 3];
}

// The lower half of the ranks, and the others.
inline std::vector<std::vector<Rank>> two_hosts(int size) {
  std::vector<std::vector<Rank>> hosts(std::min(size, 2));
  for (Rank r = 0; r < size; ++r) hosts[size > 1 && r >= size / 2 ? 1 : 0].push_back(r);
  return hosts;
}

// The progress threads of processes, by rank: their groups share them.
using Threads = std::vector<std::shared_ptr<ProgressThread>>;

inline Threads threads_of(int processes) {
  Threads made;
  for (int i = 0; i < processes; ++i) made.push_back(std::make_shared<ProgressThread>());
  return made;
}

class Ranks {
 public:
  explicit Ranks(int size, std::string_view transport = "inproc", Tuning tuning = {},
                 std::vector<std::vector<Rank>> hosts = {}, bool mortal = false,
                 const Threads& shared = {}) {
    std::vector<std::vector<UniqueFd>> control(at(size)), collective(at(size)), transfer(at(size));
    for (auto* lane : {&control, &collective, &transfer}) {
      for (auto& row : *lane) row.resize(at(size));
      for (int a = 0; a < size; ++a)
        for (int b = a + 1; b < size; ++b) {
          auto [one, other] = transport::ends_for(lane == &control ? "shm" : transport);
          (*lane)[at(a)][at(b)] = std::move(one);
          (*lane)[at(b)][at(a)] = std::move(other);
        }
    }
    shadows_.resize(at(size));
    for (auto* lane : {&control, &collective, &transfer})
      for (int r = 0; mortal && r < size; ++r)
        for (const UniqueFd& socket : (*lane)[at(r)])
          if (socket.valid()) shadows_[at(r)].emplace_back(::dup(socket.get()));
    for (int r = 0; r < size; ++r) {
      if (!shared.empty()) tuning.progress = shared[at(r)];
      communicators_.push_back(
          std::make_unique<Communicator>(Identity{r, size, /*communicator=*/7, hosts}, tuning));
    }
    run([&](Communicator& comm) {
      const int me = comm.identity().rank;
      for (int peer = 0; peer < size; ++peer)
        if (peer != me) comm.adopt_control(std::move(control[at(me)][at(peer)]), peer);
      for (int peer = 0; peer < size; ++peer) {
        if (peer == me) continue;
        comm.adopt_link(Lane::kCollective, transport, std::move(collective[at(me)][at(peer)]), peer,
                        10);
        comm.adopt_link(Lane::kPointToPoint, transport, std::move(transfer[at(me)][at(peer)]), peer,
                        10);
      }
    });
  }

  int size() const { return static_cast<int>(communicators_.size()); }
  Communicator& operator[](int rank) { return *communicators_[at(rank)]; }
  // As a killed process would: its sockets end without a word. Only where `mortal`.
  void vanish(int rank) {
    for (const UniqueFd& socket : shadows_[at(rank)]) ::shutdown(socket.get(), SHUT_RDWR);
  }

  // A peer whose inquiry the rank has received and not read yet; only where `mortal`.
  Rank who_asks(int rank) const {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank) continue;
      std::array<transport::ControlFrame, 8> frames;
      const UniqueFd& control = shadows_[at(rank)][at(peer < rank ? peer : peer - 1)];
      ::recv(control.get(), frames.data(), sizeof frames, MSG_PEEK | MSG_DONTWAIT);
      for (const auto& each : frames)
        if (each.type == transport::ControlType::kInquiry) return peer;
    }
    return kNoPeer;
  }

  // Runs `body` once per rank, in threads; returns what each threw (null: nothing).
  std::vector<std::exception_ptr> outcomes(const std::function<void(Communicator&)>& body) {
    std::vector<std::exception_ptr> thrown(communicators_.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < communicators_.size(); ++r) {
      if (!communicators_[r]) continue;
      threads.emplace_back([&, r] {
        try {
          body(*communicators_[r]);
        } catch (...) {
          thrown[r] = std::current_exception();
        }
      });
    }
    for (std::thread& each : threads) each.join();
    return thrown;
  }

  // The same; rethrows the first.
  void run(const std::function<void(Communicator&)>& body) {
    for (const auto& each : outcomes(body))
      if (each) std::rethrow_exception(each);
  }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<std::vector<UniqueFd>> shadows_;  // duplicates of each rank's sockets
};

template <typename T>
Array array_of(std::vector<T>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size()};
}

}  // namespace gradwire::exec
