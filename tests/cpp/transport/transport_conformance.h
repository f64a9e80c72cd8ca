// What every transport must do, whatever it is made of. A transport's own test names it; see
// transport_shm_test.cc.
#pragma once

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>

#include "transport_harness.h"

namespace gradwire::transport {

class TransportConformance : public testing::TestWithParam<const char*> {
 protected:
  static LinkOptions small() {
    LinkOptions options = fresh();
    options.max_message = 64 * 1024;
    options.messages = 4;
    return options;
  }
  // As they are by themselves, for one of two ranks.
  static LinkOptions fresh() { return {.size = 2, .context = context_for(GetParam())}; }
  static bool has_processes() {
    const bool threads_only =
        GetParam() == std::string("inproc") || rdma_library != Verbs::kLibrary;
    return kForkWorks && !threads_only;
  }

  // Fills the staging, and whatever lies between, with numbered messages until there is no room.
  static std::size_t send_until_full(Transport& from, const std::vector<Rank>& to) {
    constexpr std::size_t kNeverSoMany = 10'000;
    std::size_t sent = 0;
    while (sent < kNeverSoMany && try_send(from, to, from.max_message(), sent)) ++sent;
    EXPECT_LT(sent, kNeverSoMany);
    return sent;
  }

  // Runs `body` as rank 1 in a process of its own, joined to a rank 0 here.
  struct Forked {
    std::unique_ptr<Transport> transport;
    pid_t child = -1;
    int wait() const {
      int status = 0;
      ::waitpid(child, &status, 0);
      return status;
    }
  };
  Forked fork_peer(const std::function<void(Transport&)>& body) const {
    Ends ends = ends_for(GetParam());
    Forked forked;
    forked.child = ::fork();
    if (forked.child == 0) {
      ends.first.reset();
      run_child(std::move(ends.second), body);
    }
    ends.second.reset();
    forked.transport = join(0, std::move(ends.first));
    return forked;
  }

 private:
  static std::unique_ptr<Transport> join(Rank rank, UniqueFd socket) {
    LinkOptions options = small();
    options.rank = rank;
    options.size = 2;
    auto transport = make_transport(GetParam(), options);
    transport->adopt(with_keys(std::move(socket), rank == 0), 1 - rank, kTestSeconds);
    return transport;
  }
  [[noreturn]] static void run_child(UniqueFd socket, const std::function<void(Transport&)>& body) {
    try {
      body(*join(1, std::move(socket)));
    } catch (const std::exception& error) {
      ::_exit(1);
    }
    ::_exit(testing::Test::HasFailure() ? 2 : 0);
  }
};

TEST_P(TransportConformance, IsListedAndUsableHere) {
  if (has_processes()) {
    EXPECT_EQ(open_transport(GetParam(), {}).why_not, "");
  }
  const Transports mesh = connect(GetParam(), 3, small());
  EXPECT_EQ(mesh[1]->name(), GetParam());
  EXPECT_EQ(mesh[1]->peers(), (std::vector<Rank>{0, 2}));
  EXPECT_EQ(mesh[1]->max_message(), small().max_message);
}

TEST_P(TransportConformance, MessagesOfAPairKeepTheirOrder) {
  const Transports mesh = connect(GetParam(), 2, small());
  constexpr std::size_t kMessages = 2000;
  run_threads(2, [&](Rank rank) {
    Transport& self = *mesh[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; rank == 0 && i < kMessages; ++i) send(self, {1}, i % 97, i);
    for (std::size_t i = 0; rank == 1 && i < kMessages; ++i) expect_message(self, 0, i % 97, i);
    flush_all(self);
  });
}

TEST_P(TransportConformance, EveryLengthArrivesAligned) {
  const Transports mesh = connect(GetParam(), 2, small());
  const std::size_t most = small().max_message;
  for (std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{8},
                            std::size_t{63}, std::size_t{64}, std::size_t{65}, std::size_t{4093},
                            std::size_t{8192}, std::size_t{8193}, most - 1, most}) {
    const std::array peers{1};
    const Bytes staging = mesh[0]->reserve(peers, bytes);
    ASSERT_NE(staging.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(staging.data()) % 64, 0U);
    fill(staging, bytes);
    mesh[0]->commit(bytes);
    wait_until(*mesh[1], [&] { return mesh[0]->flush() && mesh[1]->peek(0).has_value(); });
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mesh[1]->peek(0)->data()) % 8, 0U);
    expect_message(*mesh[1], 0, bytes, bytes);
  }
}

TEST_P(TransportConformance, CommitMaySendLessThanReserved) {
  const Transports mesh = connect(GetParam(), 2, small());
  const std::array peers{1};
  fill(mesh[0]->reserve(peers, 1000), 5);
  EXPECT_THROW(mesh[0]->commit(1001), InvalidArgument);
  mesh[0]->commit(10);
  expect_message(*mesh[1], 0, 10, 5);
  EXPECT_THROW(mesh[0]->commit(0), InvalidArgument);  // nothing is reserved now
}

TEST_P(TransportConformance, WrongCallsAreRefusedAndHarmNothing) {
  const Transports mesh = connect(GetParam(), 2, small());
  const std::array to_peer{1};
  const std::array to_self{0};
  EXPECT_THROW(mesh[0]->reserve(to_peer, small().max_message + 1), InvalidArgument);
  EXPECT_THROW(mesh[0]->reserve(to_self, 1), InvalidArgument);
  EXPECT_THROW(mesh[0]->reserve({}, 1), InvalidArgument);
  EXPECT_THROW(mesh[0]->peek(7), InvalidArgument);
  EXPECT_THROW(mesh[0]->release(1), InvalidArgument);
  EXPECT_THROW(mesh[0]->adopt(ends_for(GetParam()).first, 1, kTestSeconds), InvalidArgument);
  send(*mesh[0], {1}, 100, 1);
  expect_message(*mesh[1], 0, 100, 1);
}

TEST_P(TransportConformance, OneStagingServesSeveralReaders) {
  const Transports mesh = connect(GetParam(), 4, small());
  const auto messages = static_cast<std::size_t>(10 * small().messages);
  run_threads(4, [&](Rank rank) {
    Transport& self = *mesh[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < messages; ++i) {
      if (rank == 0) send(self, {1, 2, 3}, 1000 + i, i);
      if (rank != 0) expect_message(self, 0, 1000 + i, i);
    }
    flush_all(self);
  });
}

TEST_P(TransportConformance, FullStagingMakesRoomAndRings) {
  const Transports mesh = connect(GetParam(), 2, small());
  const std::size_t sent = send_until_full(*mesh[0], {1});
  EXPECT_GE(sent, static_cast<std::size_t>(small().messages));
  mesh[0]->arm();
  const std::array peers{1};
  ASSERT_EQ(mesh[0]->reserve(peers, 1).data(), nullptr);
  std::size_t received = 0;
  while (!rings(*mesh[0], 0) && received < sent)
    expect_message(*mesh[1], 0, small().max_message, received++);
  EXPECT_TRUE(rings(*mesh[0], 0));
  mesh[0]->disarm();
  run_threads(2, [&](Rank rank) {
    if (rank == 0) send(*mesh[0], {1}, 1, sent);
    if (rank == 0) flush_all(*mesh[0]);
    while (rank == 1 && received < sent)
      expect_message(*mesh[1], 0, small().max_message, received++);
    if (rank == 1) expect_message(*mesh[1], 0, 1, sent);
  });
}

TEST_P(TransportConformance, SmallMessagesAmongLargeOnesKeepTheirOrder) {
  const Transports mesh = connect(GetParam(), 2, small());
  const std::array lengths{small().max_message, std::size_t{8},   std::size_t{0},
                           std::size_t{120},    std::size_t{121}, std::size_t{9}};
  run_threads(2, [&](Rank rank) {
    Transport& self = *mesh[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < 500; ++i) {
      const std::size_t length = lengths[i % lengths.size()];
      if (rank == 0) send(self, {1}, length, i);
      if (rank == 1) expect_message(self, 0, length, i);
    }
    flush_all(self);
  });
}

TEST_P(TransportConformance, AFullShareOfOnePeerHoldsUpNoOther) {
  LinkOptions shared = small();
  shared.messages_per_peer = 2;
  const Transports mesh = connect(GetParam(), 3, shared);
  send_until_full(*mesh[0], {1});
  for (std::size_t i = 0; i < 10; ++i) {
    send(*mesh[0], {2}, 100, i);
    expect_message(*mesh[2], 0, 100, i);
  }
}

TEST_P(TransportConformance, AReleaseThatLeavesOtherReadersRings) {
  LinkOptions shared = small();
  shared.messages_per_peer = 2;
  const Transports mesh = connect(GetParam(), 3, shared);
  const std::size_t sent = send_until_full(*mesh[0], {1, 2});
  const std::array peers{1};
  std::size_t received = 0;
  while (mesh[0]->reserve(peers, 1).data() == nullptr) {  // rank 2 reads nothing
    mesh[0]->arm();
    if (mesh[0]->reserve(peers, 1).data() != nullptr) break;
    while (!rings(*mesh[0], 0) && received < sent)
      expect_message(*mesh[1], 0, shared.max_message, received++);
    ASSERT_TRUE(rings(*mesh[0], 0));
    mesh[0]->disarm();
  }
  EXPECT_LE(received, sent);
}

TEST_P(TransportConformance, PeekShowsTheSameMessageUntilRelease) {
  const Transports mesh = connect(GetParam(), 2, small());
  EXPECT_FALSE(mesh[1]->peek(0).has_value());
  send(*mesh[0], {1}, 100, 1);
  send(*mesh[0], {1}, 200, 2);
  wait_until(*mesh[1], [&] { return mesh[1]->peek(0).has_value(); });
  const ConstBytes first = *mesh[1]->peek(0);
  EXPECT_EQ(mesh[1]->peek(0)->data(), first.data());
  expect_message(*mesh[1], 0, 100, 1);
  expect_message(*mesh[1], 0, 200, 2);
  EXPECT_FALSE(mesh[1]->peek(0).has_value());
}

TEST_P(TransportConformance, AMessageHeldBackDoesNotBlockOthers) {
  const Transports mesh = connect(GetParam(), 3, small());
  send(*mesh[0], {1, 2}, 500, 99);  // rank 2 leaves it unread
  const auto messages = static_cast<std::size_t>(5 * small().messages);
  for (std::size_t i = 0; i < messages; ++i) {
    if (i == 0) expect_message(*mesh[1], 0, 500, 99);
    send(*mesh[0], {1}, 100, i);
    expect_message(*mesh[1], 0, 100, i);
  }
  expect_message(*mesh[2], 0, 500, 99);
}

TEST_P(TransportConformance, NoWakeUpIsLost) {
  const Transports mesh = connect(GetParam(), 2, small());
  constexpr std::size_t kRounds = 10'000;
  run_threads(2, [&](Rank rank) {
    Transport& self = *mesh[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < kRounds; ++i) {
      if (rank == 0) send(self, {1}, 64, i);
      expect_message(self, 1 - rank, 64, i);
      if (rank == 1) send(self, {0}, 64, i);
    }
  });
}

TEST_P(TransportConformance, NoWakeUpForRoomIsLost) {
  LinkOptions one_cell = small();
  one_cell.messages = 1;
  const Transports mesh = connect(GetParam(), 2, one_cell);
  constexpr std::size_t kRounds = 5'000;
  run_threads(2, [&](Rank rank) {
    Transport& self = *mesh[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; rank == 0 && i < kRounds; ++i) send(self, {1}, 8, i);
    for (std::size_t i = 0; rank == 1 && i < kRounds; ++i) expect_message(self, 0, 8, i);
    flush_all(self);
  });
}

inline constexpr int kFloodRanks = 4;

// A rank of the flood: sends numbered messages of random length to random sets of peers, and reads
// whatever comes, until it has sent and read all.
class Flooder {
 public:
  Flooder(Transport& self, Rank rank)
      : self_(self), rank_(rank), random_(static_cast<std::uint32_t>(rank)) {
    for (Rank peer = 0; peer < kFloodRanks; ++peer)
      if (peer != rank) peers_.push_back(peer);
  }
  void run() {
    wait_until(self_, [this] {
      while (unsent_ > 0 && send_one()) --unsent_;
      for (Rank peer : peers_)
        while (const auto message = self_.peek(peer)) read(peer, *message);
      return unsent_ == 0 && ended_ == peers_.size() && self_.flush();
    });
  }

 private:
  struct Label {
    std::size_t seed = 0;
    bool last = false;
    std::array<std::size_t, kFloodRanks> nth{};  // messages to each rank so far, with this one
  };
  bool send_one() {
    const bool last = unsent_ == 1;
    std::shuffle(peers_.begin(), peers_.end(), random_);
    const std::size_t readers = last ? peers_.size() : 1 + random_() % peers_.size();
    const std::span to(peers_.data(), readers);
    const std::size_t bytes = sizeof(Label) + random_() % 20'000;
    const Bytes staging = self_.reserve(to, bytes);
    if (staging.data() == nullptr) return false;
    label_.seed = unsent_;
    label_.last = last;
    for (Rank peer : to) ++label_.nth[static_cast<std::size_t>(peer)];
    fill(staging, label_.seed);
    std::memcpy(staging.data(), &label_, sizeof label_);
    self_.commit(bytes);
    return true;
  }
  void read(Rank from, ConstBytes message) {
    Label label;
    std::memcpy(&label, message.data(), sizeof label);
    EXPECT_EQ(label.nth[static_cast<std::size_t>(rank_)],
              ++received_[static_cast<std::size_t>(from)]);
    EXPECT_TRUE(matches(message.subspan(sizeof label), label.seed, sizeof label))
        << "rank " << rank_ << ": message " << label.seed << " from rank " << from;
    ended_ += label.last;
    self_.release(from);
  }

  Transport& self_;
  Rank rank_;
  std::mt19937 random_;
  std::vector<Rank> peers_;
  Label label_;
  std::array<std::size_t, kFloodRanks> received_{};
  std::size_t unsent_ = 500, ended_ = 0;
};

TEST_P(TransportConformance, AFloodInAllDirectionsArrivesWhole) {
  const Transports mesh = connect(GetParam(), kFloodRanks, small());
  run_threads(kFloodRanks,
              [&](Rank rank) { Flooder(*mesh[static_cast<std::size_t>(rank)], rank).run(); });
}

TEST_P(TransportConformance, APeersEndComesAfterItsMessages) {
  Transports mesh = connect(GetParam(), 3, small());
  for (std::size_t i = 0; i < 3; ++i) send(*mesh[1], {0}, 1000, i);
  flush_all(*mesh[1]);
  mesh[1].reset();
  for (std::size_t i = 0; i < 3; ++i) expect_message(*mesh[0], 1, 1000, i);
  expect_end(*mesh[0], 1);
  const std::array to_gone{2, 1};
  EXPECT_THROW(mesh[0]->reserve(to_gone, 1), TransportError);
  EXPECT_THROW(mesh[0]->peek(1), TransportError);
  send(*mesh[2], {0}, 10, 7);  // the others live on
  expect_message(*mesh[0], 2, 10, 7);
}

TEST_P(TransportConformance, WhatAGonePeerLeftUnreadDoesNotFillTheStaging) {
  Transports mesh = connect(GetParam(), 3, small());
  send_until_full(*mesh[0], {1});
  mesh[1].reset();
  expect_end(*mesh[0], 1);
  send(*mesh[0], {2}, 10, 3);
  expect_message(*mesh[2], 0, 10, 3);
}

TEST_P(TransportConformance, EndsThatDisagreeAreBothRefused) {
  LinkOptions options[2] = {small(), small()};
  options[1].max_message *= 2;
  Ends ends = ends_for(GetParam());
  UniqueFd sockets[2] = {std::move(ends.first), std::move(ends.second)};
  run_threads(2, [&](Rank rank) {
    LinkOptions& mine = options[rank];
    mine.rank = rank;
    mine.size = 2;
    const auto self = make_transport(GetParam(), mine);
    try {
      self->adopt(std::move(sockets[rank]), 1 - rank, kTestSeconds);
      ADD_FAILURE() << "rank " << rank << " did not notice";
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      const std::size_t at = std::min(text.find("max_message is"), text.size());
      std::size_t here = 0, there = 0;
      ASSERT_EQ(std::sscanf(text.c_str() + at, "max_message is %zu here and %zu", &here, &there), 2)
          << text;
      constexpr std::size_t kTransportsOwn = 64;  // that a kind of link may add to a message
      EXPECT_LT(here - mine.max_message, kTransportsOwn) << text;
      EXPECT_LT(there - options[1 - rank].max_message, kTransportsOwn) << text;
    }
    EXPECT_TRUE(self->peers().empty());
  });
}

TEST_P(TransportConformance, ASilentPeerIsATimeout) {
  const Ends ends = ends_for(GetParam());
  const auto self = make_transport(GetParam(), fresh());
  try {
    self->adopt(UniqueFd(::dup(ends.first.get())), 1, 0.05);
    ADD_FAILURE() << "a link to nobody";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.peer(), 1);
  }
}

TEST_P(TransportConformance, StrangersAndVanishedPeersAreRefused) {
  const auto self = make_transport(GetParam(), fresh());
  Ends strange = ends_for(GetParam());
  const std::string request = "GET / HTTP/1.1\r\nHost: some.where\r\nAccept: everything\r\n\r\n";
  ASSERT_EQ(::send(strange.second.get(), request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  EXPECT_THROW(self->adopt(std::move(strange.first), 1, kTestSeconds), TransportError);
  Ends vanished = ends_for(GetParam());
  vanished.second.reset();
  EXPECT_THROW(self->adopt(std::move(vanished.first), 1, kTestSeconds), TransportError);
}

TEST_P(TransportConformance, ProcessesExchangeMessages) {
  if (!has_processes()) GTEST_SKIP() << "threads only";
  constexpr std::size_t kRounds = 2000;
  const Forked peer = fork_peer([](Transport& self) {
    for (std::size_t i = 0; i < kRounds; ++i) {
      expect_message(self, 0, i, i);
      send(self, {0}, 2 * i, i);
    }
    flush_all(self);
  });
  for (std::size_t i = 0; i < kRounds; ++i) {
    send(*peer.transport, {1}, i, i);
    expect_message(*peer.transport, 1, 2 * i, i);
  }
  EXPECT_EQ(peer.wait(), 0);
}

TEST_P(TransportConformance, AKilledProcessLeavesWholeMessagesOnly) {
  if (!has_processes()) GTEST_SKIP() << "threads only";
  const Forked peer = fork_peer([](Transport& self) {
    send_until_full(self, {0});  // where the link buffers, the last of them is cut off midway
    ::raise(SIGKILL);
  });
  EXPECT_TRUE(WIFSIGNALED(peer.wait()));
  std::size_t received = 0;
  try {
    for (;; ++received) expect_message(*peer.transport, 1, small().max_message, received);
  } catch (const TransportError& error) {
    EXPECT_EQ(error.peer(), 1);
  }
  EXPECT_GE(received, 1U);
}

}  // namespace gradwire::transport
