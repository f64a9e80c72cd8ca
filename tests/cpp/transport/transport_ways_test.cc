// tcp over several ways: what was on a way that fails comes by another one, once and in order.
#include <poll.h>

#include <array>

#include "gradwire/transport/ways/tcp_ways.h"
#include "transport_harness.h"

namespace gradwire::transport {
namespace transport_ways_test {

constexpr std::size_t kLargest = 1 << 14;
constexpr int kSmallBuffer = 4096;

// One end's sockets: for each of two ways one for messages and one for acknowledgements.
using Sockets = std::array<std::array<UniqueFd, 2>, 2>;

Connection by_two_ways(Sockets sockets, const std::shared_ptr<Ways>& ways, bool first) {
  std::vector<Connection> all;
  for (int way = 0; way < 2; ++way)
    for (const bool acknowledges : {false, true}) {
      Connection& made =
          all.emplace_back(with_keys(std::move(sockets[at(way)][acknowledges ? 1 : 0]), first));
      made.ways = ways;
      made.way = way;
      made.acknowledges = acknowledges;
    }
  Connection connection = std::move(all.front());
  for (auto& each : std::span(all).subspan(1)) connection.more.push_back(std::move(each));
  return connection;
}

class TwoWays : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    links_are_sealed = GetParam();
    for (auto& way : near_)
      for (std::size_t role = 0; role < 2; ++role) {
        Ends ends = unix_ends();
        ::setsockopt(ends.first.get(), SOL_SOCKET, SO_SNDBUF, &kSmallBuffer, sizeof kSmallBuffer);
        way[role] = std::move(ends.first);
        far_[static_cast<std::size_t>(&way - near_.data())][role] = std::move(ends.second);
      }
  }
  void TearDown() override { links_are_sealed = false; }

  // Puts the test between the ends of a way's messages: they come to the first descriptor, and
  // leave by the second.
  std::pair<UniqueFd, UniqueFd> stand_between(std::size_t way) {
    Ends ends = unix_ends();
    UniqueFd in = std::exchange(far_[way][0], std::move(ends.first));
    return {std::move(in), std::move(ends.second)};
  }

  void connect() {
    for (Rank rank = 0; rank < 2; ++rank)
      ranks_.push_back(
          make_transport("tcp", {.rank = rank, .size = 2, .max_message = kLargest, .messages = 8}));
    ranks_[0]->offer(by_two_ways(std::move(near_), ways_, true), 1);
    ranks_[1]->offer(by_two_ways(std::move(far_), far_ways_, false), 0);
    for (auto& rank : ranks_) rank->complete(Deadline::after(kTestSeconds));
  }

  // Exchanges until both ends have reported this of way 1.
  void exchange_until(bool works) {
    std::array<bool, 2> told{};
    const auto hear = [&](Ways& ways, bool& one) {
      const auto news = ways.next();
      one = one || (news && news->way == 1 && news->works == works);
    };
    const Deadline deadline = Deadline::after(kTestSeconds);
    while (!(told[0] && told[1])) {
      ASSERT_FALSE(deadline.passed());
      exchange(10, [](std::size_t) {});
      ranks_[1]->flush();
      hear(*ways_, told[0]);
      hear(*far_ways_, told[1]);
    }
  }

  // New sockets of a way for both ends.
  std::array<std::vector<Connection>, 2> new_sockets() {
    std::array<std::vector<Connection>, 2> made;
    for (int role = 0; role < 2; ++role) {
      Ends ends = unix_ends();
      made[0].push_back(with_keys(std::move(ends.first), true));
      made[1].push_back(with_keys(std::move(ends.second), false));
    }
    return made;
  }

  // Sends so many messages, and receives them; `step` is called after each.
  template <typename Step>
  void exchange(std::size_t count, Step step) {
    const Rank to[] = {1};
    const auto size_of = [](std::size_t seed) { return 1 + seed * 7919 % kLargest; };
    std::size_t sent = 0, received = 0;
    const Deadline deadline = Deadline::after(kTestSeconds);
    while (received < count) {
      ASSERT_FALSE(deadline.passed()) << sent << " sent, " << received << " received";
      while (sent < count && try_send(*ranks_[0], to, size_of(sent), sent)) ++sent;
      ranks_[0]->flush();
      if (const auto message = ranks_[1]->peek(0)) {
        ASSERT_EQ(message->size(), size_of(received));
        ASSERT_TRUE(matches(*message, received));
        ranks_[1]->release(0);
        ++received;
      }
      step(received);
    }
  }

  Sockets near_, far_;
  std::shared_ptr<Ways> ways_ = std::make_shared<Ways>(2), far_ways_ = std::make_shared<Ways>(2);
  Transports ranks_;
};

constexpr std::size_t kMany = 1000;  // more than a peer keeps without an acknowledgement
static_assert(kMany > 3 * kMostKept);

TEST_P(TwoWays, MessagesComeInTheOrderOfSending) {
  connect();
  exchange(kMany, [](std::size_t) {});
  EXPECT_FALSE(ways_->next());
}

// A program that has acknowledged bytes by TCP, and then fails.
TEST_P(TwoWays, WhatALostWayHasSwallowedComesByTheOther) {
  auto [in, out] = stand_between(1);
  connect();
  std::array<char, 1 << 16> bytes;
  std::size_t swallowed = 0;
  exchange(kMany, [&, in = &in, out = &out](std::size_t received) {
    if (!in->valid()) return;
    const ssize_t got = ::recv(in->get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got <= 0) return;
    if (received < 50) {
      ASSERT_EQ(::send(out->get(), bytes.data(), static_cast<std::size_t>(got), 0), got);
    } else if ((swallowed += static_cast<std::size_t>(got)) > kLargest) {
      in->reset();
      out->reset();
    }
  });
  EXPECT_GT(swallowed, kLargest);
}

// Twice where nothing is sealed; then everything goes by the new sockets.
TEST_P(TwoWays, AWayThatHasEndedIsUsedAgainWithNewSockets) {
  const auto [in, out] = stand_between(1);
  const UniqueFd first(::dup(near_[0][0].get()));
  connect();
  ::shutdown(out.get(), SHUT_RDWR);
  UniqueFd former;
  for (std::uint32_t generation = 1; generation < (GetParam() ? 2U : 3U); ++generation) {
    exchange_until(/*works=*/false);
    EXPECT_EQ(ways_->ended(), std::vector{1});
    EXPECT_EQ(far_ways_->ended(), std::vector{1});
    auto [near, far] = new_sockets();
    former = UniqueFd(::dup(near.front().socket.get()));
    ways_->renew(1, generation, std::move(near));
    EXPECT_TRUE(ways_->ended().empty());
    far_ways_->renew(1, generation, std::move(far));
    exchange_until(/*works=*/true);
    if (generation == 1 && !GetParam()) ::shutdown(former.get(), SHUT_RDWR);
  }
  ::shutdown(first.get(), SHUT_RDWR);
  exchange(kMany, [](std::size_t) {});
}

// It waits for others meanwhile, perhaps for ones that wait for this rank.
TEST_P(TwoWays, WhatIsSentAgainWaitsForNoPeerThatHasReadItBefore) {
  std::array<UniqueFd, 2> lost;
  for (std::size_t role = 0; role < 2; ++role) lost[role] = UniqueFd(::dup(near_[1][role].get()));
  connect();
  exchange(kMostKept / 16 - 1, [](std::size_t) {});  // too few for an acknowledgement
  for (const UniqueFd& each : lost) ::shutdown(each.get(), SHUT_RDWR);
  const Rank to[] = {1};
  const Deadline deadline = Deadline::after(kTestSeconds);
  bool sent = false;
  while (!(sent = sent || try_send(*ranks_[0], to, kLargest, 1)) || !ranks_[0]->flush()) {
    ASSERT_FALSE(deadline.passed());
    for (const auto& rank : ranks_) {
      rank->arm();
      rank->disarm();
    }
  }
  expect_message(*ranks_[1], 0, kLargest, 1);
}

TEST_P(TwoWays, NewSocketsAreTakenWhenTheLastOldOnesEnd) {
  std::array<UniqueFd, 2> data;
  for (std::size_t way = 0; way < 2; ++way) data[way] = UniqueFd(::dup(near_[way][0].get()));
  connect();
  ::shutdown(data[1].get(), SHUT_RDWR);
  exchange_until(/*works=*/false);
  auto [near, far] = new_sockets();
  ways_->renew(1, 1, std::move(near));
  far_ways_->renew(1, 1, std::move(far));
  ::shutdown(data[0].get(), SHUT_RDWR);
  exchange(10, [](std::size_t) {});
}

// As it may have failed to take its ends.
TEST_P(TwoWays, NewSocketsThatThePeerDoesNotUseLoseNothing) {
  const auto [in, out] = stand_between(1);
  connect();
  ::shutdown(out.get(), SHUT_RDWR);
  exchange_until(/*works=*/false);
  auto [near, far] = new_sockets();
  const UniqueFd theirs = std::move(far.front().socket);
  ways_->renew(1, 1, std::move(near));
  far.clear();
  const Deadline deadline = Deadline::after(kTestSeconds);
  while (ways_->ended().empty()) {
    ASSERT_FALSE(deadline.passed());
    exchange(10, [](std::size_t) {});
  }
  char byte = 0;
  EXPECT_EQ(::recv(theirs.get(), &byte, 1, MSG_DONTWAIT), -1);
}

TEST_P(TwoWays, ThePeerIsGoneWhenAllWaysHaveEnded) {
  connect();
  send(*ranks_[0], {1}, 40, 1);
  ranks_[0].reset();
  expect_message(*ranks_[1], 0, 40, 1);
  expect_end(*ranks_[1], 0);
}

// It has read everything, though it has not acknowledged the last frames.
TEST_P(TwoWays, NothingIsLeftToSendToAPeerThatHasClosed) {
  connect();
  send(*ranks_[0], {1}, 40, 1);
  expect_message(*ranks_[1], 0, 40, 1);
  ranks_[1].reset();
  EXPECT_TRUE(ranks_[0]->flush());
  expect_end(*ranks_[0], 1);
  EXPECT_TRUE(ranks_[0]->is_flushed(1));
  EXPECT_TRUE(ranks_[0]->flush());
}

TEST_P(TwoWays, AnAcknowledgementOfWhatWasNotSentEndsThePeer) {
  if (GetParam()) return;  // a stranger's would not open
  const int theirs = ::dup(far_[1][1].get());
  connect();
  send(*ranks_[0], {1}, 40, 1);
  const Acknowledgement foreign{.next = 2};
  ASSERT_EQ(::send(theirs, &foreign, sizeof foreign, 0), static_cast<ssize_t>(sizeof foreign));
  expect_end(*ranks_[0], 1);
  ::close(theirs);
}

INSTANTIATE_TEST_SUITE_P(PlainAndSealed, TwoWays, testing::Bool());

TEST(MissingFrames, WhatNobodyHasTriedToReadIsNotMissing) {
  TcpWays ways(std::make_shared<Ways>(2), kLargest);
  const TcpWays::Clock::time_point now = TcpWays::Clock::now(), later = now + std::chrono::hours(1);
  const std::array<std::byte, 8> payload{};
  ways.set_aside(1, payload);
  EXPECT_FALSE(ways.misses_one(now));
  EXPECT_FALSE(ways.misses_one(later));
  ways.drained(later);
  EXPECT_TRUE(ways.misses_one(later));
  ways.consume();  // frame 0 has come
  ways.drained(later);
  EXPECT_FALSE(ways.misses_one(later));
}

// The sending end of a link whose peer, the test, misses the frame that was sent by a way.
class AMissedFrame : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    for (int way = 0; way < 2; ++way) {
      ways_.add(Stream(acks_[at(way)].first.get()), way);
      ways_.add_data(data_[at(way)].first.get(), way);
    }
    const Prefix prefix(0);
    ways_.send_by(ways_.keep(std::as_bytes(std::span(&prefix, 1))), GetParam());
  }
  void hear_that_it_is_missing() {
    const Acknowledgement missing{.missing = 1};
    const int theirs = acks_[at(GetParam())].second.get();
    ASSERT_EQ(::send(theirs, &missing, sizeof missing, 0), static_cast<ssize_t>(sizeof missing));
    ways_.hear(TcpWays::Clock::now() + std::chrono::seconds(10));
  }

  std::array<Ends, 2> acks_{unix_ends(), unix_ends()}, data_{unix_ends(), unix_ends()};
  TcpWays ways_{std::make_shared<Ways>(2), kLargest};
};

TEST_P(AMissedFrame, EndsItsWayWhereThePeersHostHasIt) {
  hear_that_it_is_missing();
  EXPECT_TRUE(ways_.ended(GetParam()));
  EXPECT_TRUE(ways_.usable(1 - GetParam()));
  EXPECT_EQ(ways_.next_again(), 0U);
}

TEST_P(AMissedFrame, IsSentAgainWhereItsWayIsSlow) {
  ASSERT_EQ(::send(data_[at(GetParam())].first.get(), "slow", 4, 0), 4);
  EXPECT_FALSE(ways_.delivered());
  hear_that_it_is_missing();
  EXPECT_TRUE(ways_.usable(GetParam()));
  EXPECT_EQ(ways_.next_again(), 0U);
}

TEST_P(AMissedFrame, IsSentAgainByTheLastWay) {
  ways_.leave_out(1 - GetParam(), TcpWays::State::kEnded, "it was closed");
  hear_that_it_is_missing();
  EXPECT_TRUE(ways_.usable(GetParam()));
  EXPECT_EQ(ways_.next_again(), 0U);
}

INSTANTIATE_TEST_SUITE_P(ByEachWay, AMissedFrame, testing::Values(0, 1));

TEST(FramesOfWays, TakeNoMoreMemoryThanTheBound) {
  constexpr std::size_t kFrame = 1 << 20;
  TcpWays sender(std::make_shared<Ways>(2), kFrame), receiver(std::make_shared<Ways>(2), kFrame);
  const std::vector<std::byte> frame(kFrame);
  std::uint32_t kept = 0;
  for (; sender.has_room(); ++kept) sender.keep(frame);
  EXPECT_EQ(kept, kMostKeptBytes / kFrame);
  for (std::uint32_t number = 1; number <= kept + 2; ++number) receiver.set_aside(number, frame);
  EXPECT_THROW(receiver.set_aside(kept + 3, frame), Error);
}

TEST(FramesOfWays, SmallOnesTakeLittleMemory) {
  TcpWays sender(std::make_shared<Ways>(2), kMostKeptBytes);
  const std::array<std::byte, 64> frame{};
  std::uint32_t kept = 0;
  for (; sender.has_room(); ++kept) sender.keep(frame);
  EXPECT_EQ(kept, kMostKept);
}

TEST(NewsOfWays, AnEndOfOlderSocketsIsNoEndOfTheWay) {
  Ways ways(2);
  ways.end(1, 0);
  EXPECT_EQ(ways.ended(), std::vector{1});
  std::vector<Connection> made(2);
  made[0].part = 0;
  made[1].part = 1;
  ways.renew(1, 2, std::move(made));
  ways.end(1, 0);
  EXPECT_TRUE(ways.ended().empty());
  ways.renew(1, 1, {});  // older ones, and too late
  EXPECT_EQ(ways.generation(1), 2U);
  EXPECT_EQ(ways.take(1, 1).size(), 1U);
  EXPECT_TRUE(ways.take(1, 1).empty());
  EXPECT_TRUE(ways.take(0, 0).empty());
}

TEST(NewsOfWays, OfAWayThatIsMadeAnewOnlyThatItHadFailed) {
  const auto all = std::make_shared<Ways>(2);
  TcpWays ways(all, kLargest);
  ways.leave_out(1, TcpWays::State::kEnded, "reset");
  for (int way = 0; way < 2; ++way) ways.renew(way, 1);  // way 0 has worked
  ways.tell(TcpWays::Clock::now() + std::chrono::seconds(1));
  const auto failed = all->next();
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->way, 1);
  EXPECT_EQ(failed->why, "reset");
  EXPECT_FALSE(all->next());
}

TEST(NewsOfWays, OneLineForAllLinksOfAPeer) {
  Ways ways(2);
  const int one = 1, other = 2;
  ways.leave_out(1, &one, "it was closed");
  ways.leave_out(1, &other, "reset");
  const auto failed = ways.next();
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->way, 1);
  EXPECT_FALSE(failed->works);
  EXPECT_EQ(failed->why, "it was closed");
  EXPECT_FALSE(ways.next());
  ways.use_again(1, &one);
  EXPECT_FALSE(ways.next());
  ways.use_again(1, &other);
  EXPECT_TRUE(ways.next()->works);
}

}  // namespace transport_ways_test
}  // namespace gradwire::transport
