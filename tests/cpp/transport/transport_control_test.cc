#include "gradwire/transport/control.h"

#include <cstring>

#include "gradwire/transport/ways/ways.h"
#include "transport_harness.h"

namespace gradwire::transport {
namespace transport_control_test {

ControlFrame frame_of(ControlType type, std::uint64_t value, std::string_view text = "") {
  ControlFrame frame;
  frame.type = type;
  frame.value = value;
  set_text(frame, text);
  return frame;
}

ControlEvent wait_for_event(Control& control) {
  pollfd bell{control.doorbell(), POLLIN, 0};
  for (;;) {
    if (auto event = control.poll()) return *event;
    if (::poll(&bell, 1, 60'000) != 1) throw Timeout("no control event", kNoPeer);
  }
}

// Rank 0's control and the bare other end of its socket to rank 1.
struct Lonely {
  explicit Lonely(Ends ends = unix_ends()) : peer(std::move(ends.second)) {
    control.adopt(std::move(ends.first), 1);
  }
  void say(const void* data, std::size_t bytes) {
    ASSERT_EQ(::send(peer.get(), data, bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
  }
  Control control{0, 3};
  UniqueFd peer;
};

class ControlOver : public testing::TestWithParam<const char*> {
 protected:
  ControlOver() {
    for (Rank a = 0; a < 3; ++a)
      for (Rank b = a + 1; b < 3; ++b) {
        Ends ends = ends_for(GetParam());
        ranks_[static_cast<std::size_t>(a)]->adopt(std::move(ends.first), b);
        ranks_[static_cast<std::size_t>(b)]->adopt(std::move(ends.second), a);
      }
  }
  std::array<std::unique_ptr<Control>, 3> ranks_ = {std::make_unique<Control>(0, 3),
                                                    std::make_unique<Control>(1, 3),
                                                    std::make_unique<Control>(2, 3)};
};

TEST_P(ControlOver, ABroadcastReachesAllInOrder) {
  ControlFrame failure = frame_of(ControlType::kFailure, 7, "rank 2 ran out of memory");
  failure.culprit = 2;
  failure.kind = FailureKind::kTimeout;
  failure.calls = 41;
  ranks_[0]->broadcast(frame_of(ControlType::kPosition, 6));
  ranks_[0]->broadcast(failure);
  for (std::size_t rank : {1U, 2U}) {
    EXPECT_EQ(wait_for_event(*ranks_[rank]).frame.value, 6U);
    const ControlEvent event = wait_for_event(*ranks_[rank]);
    EXPECT_EQ(event.from, 0);
    EXPECT_FALSE(event.gone);
    EXPECT_EQ(event.frame.culprit, 2);
    EXPECT_EQ(event.frame.kind, FailureKind::kTimeout);
    EXPECT_EQ(event.frame.calls, 41U);
    EXPECT_EQ(text_of(event.frame), "rank 2 ran out of memory");
    EXPECT_FALSE(ranks_[rank]->poll().has_value());
  }
}

TEST_P(ControlOver, FramesComeBeforeTheEndAndTheEndOnce) {
  for (std::uint64_t i = 0; i < 3; ++i) ranks_[1]->send(0, frame_of(ControlType::kPosition, i));
  ranks_[1].reset();
  for (std::uint64_t i = 0; i < 3; ++i) EXPECT_EQ(wait_for_event(*ranks_[0]).frame.value, i);
  const ControlEvent end = wait_for_event(*ranks_[0]);
  EXPECT_TRUE(end.gone);
  EXPECT_EQ(end.from, 1);
  EXPECT_EQ(end.frame.culprit, 1);
  EXPECT_NE(text_of(end.frame).find("rank 1 is gone"), std::string::npos);
  EXPECT_FALSE(ranks_[0]->poll().has_value());
  EXPECT_FALSE(ranks_[0]->connected(1));
  EXPECT_TRUE(ranks_[0]->connected(2));
  EXPECT_TRUE(wait_for_event(*ranks_[2]).gone);
  ranks_[0]->broadcast(frame_of(ControlType::kPosition, 9));  // the dead one is skipped
  EXPECT_EQ(wait_for_event(*ranks_[2]).frame.value, 9U);
}

TEST_P(ControlOver, TheEndAfterAByeIsSilent) {
  ranks_[1]->broadcast(frame_of(ControlType::kBye, 0));
  ranks_[1].reset();
  EXPECT_EQ(wait_for_event(*ranks_[0]).frame.type, ControlType::kBye);
  EXPECT_TRUE(ranks_[0]->said_bye(1));
  EXPECT_FALSE(ranks_[0]->said_bye(2));
  ranks_[2]->send(0, frame_of(ControlType::kPosition, 5));
  const ControlEvent next = wait_for_event(*ranks_[0]);
  EXPECT_EQ(next.from, 2);
  pollfd bell{ranks_[0]->doorbell(), POLLIN, 0};
  while (ranks_[0]->connected(1)) {
    ASSERT_EQ(::poll(&bell, 1, 60'000), 1);
    EXPECT_FALSE(ranks_[0]->poll().has_value());
  }
}

INSTANTIATE_TEST_SUITE_P(Sockets, ControlOver, testing::Values("shm", "tcp"));

// Two ranks with two ways to each other.
struct ByTwoWays {
  ByTwoWays() {
    for (int way = 0; way < 2; ++way) {
      Ends ends = tcp_ends();
      descriptors[at(way)] = ends.first.get();
      Connection here(std::move(ends.first)), there(std::move(ends.second));
      here.ways = ways[0];
      there.ways = ways[1];
      here.way = there.way = way;
      one->adopt(std::move(here), 1);
      other.adopt(std::move(there), 0);
    }
  }
  std::array<std::shared_ptr<Ways>, 2> ways{std::make_shared<Ways>(2), std::make_shared<Ways>(2)};
  std::unique_ptr<Control> one = std::make_unique<Control>(0, 2);
  Control other{1, 2};
  std::array<int, 2> descriptors{};
};

// Leaves a new control socket of way 1.
void renew(Ways& ways, Connection made) {
  std::vector<Connection> sockets;
  sockets.push_back(std::move(made));
  ways.renew(1, 1, std::move(sockets));
}

TEST(ControlByWays, EachFrameComesOnceAndInOrder) {
  ByTwoWays pair;
  for (std::uint64_t i = 0; i < 50; ++i) pair.one->send(1, frame_of(ControlType::kPosition, i));
  for (std::uint64_t i = 0; i < 50; ++i) EXPECT_EQ(wait_for_event(pair.other).frame.value, i);
  pair.one->send(1, frame_of(ControlType::kBye, 50));
  EXPECT_EQ(wait_for_event(pair.other).frame.value, 50U);
}

TEST(ControlByWays, ThePeerEndsWithTheLastWay) {
  for (const std::size_t first : {0U, 1U}) {
    ByTwoWays pair;
    ::shutdown(pair.descriptors[first], SHUT_RDWR);
    pair.one->send(1, frame_of(ControlType::kPosition, 1));
    EXPECT_EQ(wait_for_event(pair.other).frame.value, 1U);
    pair.one->send(1, frame_of(ControlType::kPosition, 2));
    EXPECT_EQ(wait_for_event(pair.other).frame.value, 2U);
    pair.one.reset();
    EXPECT_TRUE(wait_for_event(pair.other).gone);
    EXPECT_FALSE(pair.other.connected(0));
  }
}

// Else a frame that was sent before the sender had the new socket would come after its turn.
TEST(ControlByWays, WhatIsReadByANewSocketFirstDoesNotOvertakeOlderFrames) {
  ByTwoWays pair;
  const auto look = [](Control& control) {  // takes new sockets
    pollfd bell{control.doorbell(), POLLIN, 0};
    ASSERT_EQ(::poll(&bell, 1, 60'000), 1);
    EXPECT_FALSE(control.poll());
  };
  Ends ends = tcp_ends();
  renew(*pair.ways[1], std::move(ends.second));
  look(pair.other);
  for (std::uint64_t i = 0; i < 50; ++i) pair.one->send(1, frame_of(ControlType::kPosition, i));
  renew(*pair.ways[0], std::move(ends.first));
  look(*pair.one);
  pair.one->send(1, frame_of(ControlType::kPosition, 50));
  for (std::uint64_t i = 0; i <= 50; ++i) ASSERT_EQ(wait_for_event(pair.other).frame.value, i);
}

TEST(ControlByWays, AllSocketsAreReleased) {
  ByTwoWays pair;
  const auto released = pair.one->release(1, kTestSeconds);
  ASSERT_EQ(released.size(), 2U);
  EXPECT_FALSE(pair.one->connected(1));
  ASSERT_EQ(::send(released[1].connection.socket.get(), kReleasedMagic.data(), 4, 0), 4);
  EXPECT_TRUE(wait_for_event(pair.other).gone);
  const auto theirs = pair.other.release(0, kTestSeconds);
  ASSERT_EQ(theirs.size(), 2U);
  EXPECT_EQ(theirs[0].received, "");
  EXPECT_EQ(theirs[1].received, kReleasedMagic);
}

TEST(Control, AFrameArrivesByteByByte) {
  Lonely lonely;
  const ControlFrame frame = frame_of(ControlType::kPosition, 77, "all_reduce");
  std::array<char, sizeof frame> bytes;
  std::memcpy(bytes.data(), &frame, sizeof frame);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(lonely.control.poll().has_value());
    lonely.say(&bytes[i], 1);
  }
  const ControlEvent event = wait_for_event(lonely.control);
  EXPECT_EQ(event.frame.value, 77U);
  EXPECT_EQ(text_of(event.frame), "all_reduce");
}

TEST(Control, ImpossibleFramesEndThePeer) {
  std::vector<ControlFrame> frames(8, frame_of(ControlType::kPosition, 0));
  frames[0].magic = 1;
  frames[1].type = ControlType{0};
  frames[2].type = ControlType{7};
  frames[3].kind = FailureKind{6};
  frames[4].culprit = 3;
  frames[5].culprit = -2;
  frames[6].type = ControlType::kFailure;
  frames[6].value = std::uint64_t{1} << 31;
  frames[7].flags = kInOtherCommunicator;
  frames[7].segment = (1U << 31) - 1;
  for (const ControlFrame& frame : frames) {
    Lonely lonely;
    lonely.say(&frame, sizeof frame);
    const ControlEvent event = wait_for_event(lonely.control);
    EXPECT_TRUE(event.gone);
    EXPECT_NE(text_of(event.frame).find("no control frame"), std::string::npos);
    EXPECT_FALSE(lonely.control.connected(1));
  }
}

TEST(Control, ForeignBytesAfterAByeEndThePeerSilently) {
  links_are_sealed = true;
  Ends ends = unix_ends();
  const UniqueFd foreign(::dup(ends.second.get()));
  Control one(0, 2), other(1, 2);
  one.adopt(with_keys(std::move(ends.first), true), 1);
  other.adopt(with_keys(std::move(ends.second), false), 0);
  links_are_sealed = false;
  other.send(0, frame_of(ControlType::kBye, 0));
  EXPECT_EQ(wait_for_event(one).frame.type, ControlType::kBye);
  const std::array<char, 1024> bytes{1};
  ASSERT_EQ(::send(foreign.get(), bytes.data(), bytes.size(), 0), 1024);
  EXPECT_FALSE(one.poll());
  EXPECT_FALSE(one.connected(1));
}

TEST(Control, ALongTextIsCut) {
  const ControlFrame frame = frame_of(ControlType::kFailure, 0, std::string(1000, 'x'));
  EXPECT_EQ(text_of(frame), std::string(frame.text.size(), 'x'));
}

// Whole frames that lie unread on a bare socket.
std::vector<ControlFrame> unread(const UniqueFd& socket) {
  std::vector<ControlFrame> frames;
  ControlFrame frame;
  while (::recv(socket.get(), &frame, sizeof frame, MSG_DONTWAIT) == sizeof frame)
    frames.push_back(frame);
  return frames;
}

TEST(Control, APeerAtRestIsToldLittleButTheLastWord) {
  for (const char* kind : {"shm", "tcp"}) {
    Lonely lonely(ends_for(kind));
    for (std::uint64_t i = 0; i < 10'000; ++i)
      lonely.control.send(1, frame_of(ControlType::kPosition, i));
    lonely.control.send(1, frame_of(ControlType::kFailure, 0, "enough"));
    const auto frames = unread(lonely.peer);
    ASSERT_EQ(frames.size(), 65U) << kind;
    for (std::uint64_t i = 0; i < 64; ++i) EXPECT_EQ(frames[i].value, i);
    EXPECT_EQ(text_of(frames[64]), "enough");
    ControlFrame answer = frame_of(ControlType::kAck, 0);
    answer.received = 65;
    lonely.say(&answer, sizeof answer);
    EXPECT_FALSE(lonely.control.poll().has_value());
    lonely.control.send(1, frame_of(ControlType::kPosition, 77));
    EXPECT_EQ(unread(lonely.peer).at(0).value, 77U) << kind;
  }
}

TEST(Control, APeerThatOnlyListensIsToldOnAndOn) {
  auto [one, other] = unix_ends();
  Control speaker(0, 2), listener(1, 2);
  speaker.adopt(std::move(one), 1);
  listener.adopt(std::move(other), 0);
  for (std::uint64_t i = 0; i < 1000; ++i) {
    EXPECT_FALSE(speaker.poll().has_value());
    speaker.send(1, frame_of(ControlType::kPosition, i));
    EXPECT_EQ(wait_for_event(listener).frame.value, i);
  }
}

TEST(Control, AReleasedSocketKeepsWhatWasReadOfAFrame) {
  Lonely lonely;
  const ControlFrame frame = frame_of(ControlType::kPosition, 5);
  lonely.say(&frame, 100);
  EXPECT_FALSE(lonely.control.poll().has_value());
  const auto released = lonely.control.release(1, 10);
  ASSERT_EQ(released.size(), 1U);
  EXPECT_EQ(released[0].received, std::string(reinterpret_cast<const char*>(&frame), 100));
  lonely.say(reinterpret_cast<const char*>(&frame) + 100, sizeof frame - 100);
  std::array<char, sizeof frame> rest{};
  EXPECT_EQ(::recv(released[0].connection.socket.get(), rest.data(), rest.size(), 0),
            static_cast<ssize_t>(sizeof frame - 100));
  EXPECT_FALSE(lonely.control.connected(1));
  EXPECT_TRUE(lonely.control.release(1, 10).empty());
}

TEST(Control, APeerThatHasReleasedItsEndIsGoneAndItsWordsAreKept) {
  Lonely lonely;
  const std::string words = "GRS2: you are left out";
  ASSERT_TRUE(words.starts_with(kReleasedMagic));
  lonely.say(words.data(), words.size());
  lonely.peer.reset();
  EXPECT_TRUE(wait_for_event(lonely.control).gone);
  EXPECT_FALSE(lonely.control.connected(1));
  EXPECT_TRUE(lonely.control.send(1, frame_of(ControlType::kPosition, 1)));
  EXPECT_FALSE(lonely.control.poll().has_value());
  const auto released = lonely.control.release(1, 10);
  ASSERT_EQ(released.size(), 1U);
  EXPECT_EQ(released[0].received, words);
}

}  // namespace transport_control_test
}  // namespace gradwire::transport
