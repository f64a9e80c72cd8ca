#include "serve_job.h"

namespace gradwire::serve {
namespace serve_channel_test {

class ChannelConformance : public testing::TestWithParam<const char*> {
 protected:
  Pair pair_ = channels(GetParam());

  static MessageHeader header_of(std::uint32_t sequence, Op op = Op::kPull) {
    MessageHeader header;
    header.op = op;
    header.sequence = sequence;
    return header;
  }
  // Sends bulk frames until there is no room; returns how many.
  static std::size_t send_until_full(Channel& channel, std::uint32_t first = 0,
                                     int most = kWindow) {
    constexpr std::size_t kNeverSoMany = 1000;
    std::size_t sent = 0;
    for (Bytes room = channel.room(most); !room.empty() && sent < kNeverSoMany;
         room = channel.room(most)) {
      transport::fill(room, first + sent);
      MessageHeader header = header_of(static_cast<std::uint32_t>(first + sent));
      header.length = static_cast<std::uint32_t>(room.size());
      channel.send(header);
      ++sent;
    }
    EXPECT_LT(sent, kNeverSoMany);
    return sent;
  }
  static std::optional<ServeMessage> wait_for_message(Channel& at, Channel& other) {
    const Deadline deadline = soon();
    while (!deadline.passed() && !at.ended()) {
      other.send_queued();
      other.flush();
      if (const auto message = at.next()) return message;
      std::this_thread::yield();
    }
    return std::nullopt;
  }
};

TEST_P(ChannelConformance, CarriesMessagesAndFramesInOrder) {
  const std::size_t sent = send_until_full(*pair_.server);
  EXPECT_GE(sent, static_cast<std::size_t>(kWindow));
  for (std::uint32_t i = 0; i < sent; ++i) {
    const auto message = wait_for_message(*pair_.client, *pair_.server);
    ASSERT_TRUE(message.has_value());
    EXPECT_EQ(message->header.sequence, i);
    EXPECT_TRUE(transport::matches(message->payload, i));
    pair_.client->release();
  }
  const std::string text = "statistics";
  pair_.client->post(header_of(7, Op::kStats), std::as_bytes(std::span(text)));
  const auto message = wait_for_message(*pair_.server, *pair_.client);
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(text_of(message->payload), text);
}

TEST_P(ChannelConformance, HasAWindowThatAPeerWhoDoesNotReadNeverExceeds) {
  const std::size_t sent = send_until_full(*pair_.server);
  pair_.server->post(header_of(99, Op::kStats));
  EXPECT_TRUE(pair_.server->room().empty());
  EXPECT_EQ(send_until_full(*pair_.server, 100), 0U);
  EXPECT_EQ(pair_.server->queued(), 1U);
  // Memory of one's own holds the window; what is beyond it lies in the kernel's buffers.
  const std::string transport = GetParam();
  if (transport == "inproc" || transport == "shm") {
    EXPECT_EQ(sent, static_cast<std::size_t>(kWindow));
  }
}

TEST_P(ChannelConformance, LeavesRoomForMessagesBehindFewFrames) {
  const std::string transport = GetParam();
  if (transport != "inproc" && transport != "shm") GTEST_SKIP() << "what is read is not known";
  EXPECT_EQ(send_until_full(*pair_.server, 0, 2), 2U);
  pair_.server->post(header_of(2, Op::kStats));
  EXPECT_TRUE(pair_.server->send_queued());
  EXPECT_TRUE(pair_.server->room(2).empty());
  EXPECT_EQ(send_until_full(*pair_.server, 3), static_cast<std::size_t>(kWindow) - 3);
  for (std::uint32_t unread = kWindow; unread > 1; --unread) {
    EXPECT_TRUE(pair_.server->room(2).empty()) << unread;
    const auto message = wait_for_message(*pair_.client, *pair_.server);
    ASSERT_TRUE(message.has_value());
    EXPECT_EQ(message->header.sequence, kWindow - unread);
    pair_.client->release();
  }
  EXPECT_FALSE(pair_.server->room(2).empty());
}

TEST_P(ChannelConformance, SendsQueuedMessagesBeforeMoreFrames) {
  const std::size_t sent = send_until_full(*pair_.server);
  pair_.server->post(header_of(1000, Op::kStats));
  for (std::size_t i = 0; i < sent; ++i) {
    ASSERT_TRUE(wait_for_message(*pair_.client, *pair_.server).has_value());
    pair_.client->release();
  }
  const auto message = wait_for_message(*pair_.client, *pair_.server);
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(message->header.sequence, 1000U);
}

TEST_P(ChannelConformance, EndsWithItsPeerAndSaysWho) {
  pair_.server.reset();
  const Deadline deadline = soon();
  while (!pair_.client->ended() && !deadline.passed()) {
    pair_.client->arm();
    EXPECT_FALSE(pair_.client->next().has_value());
    pollfd bell{pair_.client->doorbell(), POLLIN, 0};
    if (!pair_.client->ended()) ::poll(&bell, 1, deadline.milliseconds_left(60'000));
    pair_.client->disarm();
    EXPECT_FALSE(pair_.client->next().has_value());
  }
  EXPECT_TRUE(pair_.client->ended());
  EXPECT_EQ(pair_.client->why(), "shard 0: the peer closed it or died");
  EXPECT_TRUE(pair_.client->room().empty());
  EXPECT_FALSE(pair_.client->next().has_value());
}

TEST_P(ChannelConformance, EndsAtForeignBytes) {
  MessageHeader header = header_of(1);
  header.zero = 1;
  pair_.client->post(header);
  EXPECT_FALSE(wait_for_message(*pair_.server, *pair_.client).has_value());
  EXPECT_TRUE(pair_.server->why().starts_with("replica a: a frame of 64 bytes"))
      << pair_.server->why();
}

INSTANTIATE_TEST_SUITE_P(All, ChannelConformance, testing::ValuesIn(kAllTransports));

TEST(Channel, IsMadeOverASocketWithinALimit) {
  auto [near, far] = transport::unix_ends();
  try {
    Channel::make(End::kServer, "shm", nullptr, std::move(near), "replica b (host:7)",
                  Deadline::after(0.01));
    ADD_FAILURE();
  } catch (const Timeout& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("replica b (host:7): ")) << error.what();
  }
}

}  // namespace serve_channel_test
}  // namespace gradwire::serve
