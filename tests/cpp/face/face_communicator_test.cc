// gradwire.h, with nothing else of gradwire: ranks that are threads, and processes over TCP.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cstdlib>
#include <memory>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gradwire/gradwire.h"

namespace gradwire::face_communicator {
namespace {

constexpr int kRanks = 3;

// Runs body(rank, its communicator) once a rank, each on a thread.
template <typename Body>
void run(const Joining& joining, Body body) {
  std::vector<RankSockets> sockets = connected_sockets(kRanks);
  std::vector<std::jthread> ranks;
  for (Rank rank = 0; rank < kRanks; ++rank)
    ranks.emplace_back([&, rank] {
      const auto comm = join(rank, std::move(sockets[at(rank)]), joining);
      body(rank, *comm);
      comm->close(/*timeout=*/60);
    });
}

template <typename T>
void expect_sum() {
  run({.transport = "inproc"}, [](Rank rank, Communicator& comm) {
    std::vector<T> x(1000, static_cast<T>(rank + 1));
    all_reduce(comm, std::span(x));
    EXPECT_EQ(x, std::vector<T>(1000, static_cast<T>(6)));
  });
}

TEST(Face, ArraysOfEachElementTypeAreSummed) {
  expect_sum<float>();
  expect_sum<double>();
  expect_sum<std::int8_t>();
  expect_sum<std::uint16_t>();
  expect_sum<std::int32_t>();
  expect_sum<std::uint64_t>();
}

TEST(Face, OptionsReachTheCall) {
  run({}, [](Rank rank, Communicator& comm) {
    std::vector<float> x(1000, static_cast<float>(rank));
    all_reduce(comm, std::span(x), {.op = ReduceOp::kMax, .algorithm = "ring"});
    EXPECT_EQ(x, std::vector<float>(1000, 2));
    EXPECT_THROW(all_reduce(comm, std::span(x), {.algorithm = "rings"}), ScheduleError);
  });
}

TEST(Face, HostsGiveHierarchicalAlgorithmsTheirGroups) {
  const AllReduce options{.algorithm = "hierarchical(ring,ring)"};
  run({.hosts = {{0, 2}, {1}}}, [&](Rank, Communicator& comm) {
    std::vector<double> x(100, 1);
    all_reduce(comm, std::span(x), options);
    EXPECT_EQ(x, std::vector<double>(100, kRanks));
  });
  run({}, [&](Rank, Communicator& comm) {
    std::vector<double> x(100, 1);
    EXPECT_THROW(all_reduce(comm, std::span(x), options), ScheduleError);
  });
}

TEST(Face, WhatACodecLosesGoesWithTheNextCall) {
  run({}, [](Rank, Communicator& comm) {
    const AllReduce options{.codec = "topk:density=0.0001",
                            .feedback = std::make_shared<codec::ErrorFeedback>()};
    std::vector<float> first{2, 1, 0, 0}, second(4);
    all_reduce(comm, std::span(first), options);
    all_reduce(comm, std::span(second), options);
    EXPECT_EQ(first, (std::vector<float>{6, 0, 0, 0}));
    EXPECT_EQ(second, (std::vector<float>{0, 3, 0, 0}));
  });
}

TEST(Face, AMissingSocketIsNamed) {
  auto sockets = connected_sockets(2);
  sockets[0][1].collective.reset();
  try {
    join(0, std::move(sockets[0]));
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "rank 0 lacks a socket to rank 1");
  }
  EXPECT_THROW(join(2, std::move(connected_sockets(2)[1])), InvalidArgument);
  EXPECT_THROW(connected_sockets(0), InvalidArgument);
}

TEST(Face, APeerThatDoesNotComeIsATimeout) {
  auto sockets = connected_sockets(2);
  EXPECT_THROW(join(0, std::move(sockets[0]), {.timeout = 0.05}), Timeout);
}

// Both ends of a TCP connection over loopback.
std::pair<UniqueFd, UniqueFd> tcp_ends() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* where = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof address;
  UniqueFd near(::socket(AF_INET, SOCK_STREAM, 0));
  EXPECT_EQ(::bind(listener.get(), where, size), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), where, &size), 0);
  EXPECT_EQ(::connect(near.get(), where, size), 0);
  return {std::move(near), UniqueFd(::accept(listener.get(), nullptr, nullptr))};
}

// Returns an exit status: 0 if the sum is right.
int sum_over_tcp(Rank rank, RankSockets sockets) {
  const auto comm = join(rank, std::move(sockets), {.transport = "tcp"});
  std::vector<float> x(100'000, static_cast<float>(rank + 1));
  all_reduce(*comm, std::span(x));
  comm->close(/*timeout=*/60);
  return x == std::vector<float>(100'000, 3) ? 0 : 1;
}

#ifndef __SANITIZE_THREAD__  // which does not follow a fork
TEST(Face, ProcessesSumOverTcp) {
  std::vector<RankSockets> sockets(2);
  for (auto& each : sockets) each.resize(2);
  for (auto way : {&PeerSockets::control, &PeerSockets::collective, &PeerSockets::point_to_point})
    std::tie(sockets[0][1].*way, sockets[1][0].*way) = tcp_ends();
  const pid_t child = ::fork();
  const Rank rank = child == 0 ? 1 : 0;
  RankSockets own = std::move(sockets[at(rank)]);
  sockets.clear();  // the other process's
  if (child == 0) std::_Exit(sum_over_tcp(rank, std::move(own)));
  EXPECT_EQ(sum_over_tcp(rank, std::move(own)), 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}
#endif

}  // namespace
}  // namespace gradwire::face_communicator
