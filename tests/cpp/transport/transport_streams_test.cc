// tcp with several streams to a peer: messages come in the order of sending, whichever stream
// brings them first.
#include <random>

#include "gradwire/transport/tcp_frames.h"
#include "transport_harness.h"

namespace gradwire::transport {
namespace transport_streams_test {

constexpr int kStreams = 3;
constexpr std::size_t kLargest = 1 << 16;

Connection streams_of(std::vector<UniqueFd> sockets, bool first) {
  Connection connection = with_keys(std::move(sockets.front()), first);
  for (std::size_t i = 1; i < sockets.size(); ++i)
    connection.more.push_back(with_keys(std::move(sockets[i]), first));
  return connection;
}

// Ranks of which each pair has several streams, with small buffers, so that all are used.
Transports connect_by_streams(int size, LinkOptions options = {.messages = 8}) {
  Transports ranks;
  options.size = size;
  options.max_message = kLargest;
  for (options.rank = 0; options.rank < size; ++options.rank)
    ranks.push_back(make_transport("tcp", options));
  for (Rank a = 0; a < size; ++a)
    for (Rank b = a + 1; b < size; ++b) {
      std::vector<UniqueFd> near, far;
      for (int i = 0; i < kStreams; ++i) {
        Ends ends = unix_ends();
        const int room = 4096;
        ::setsockopt(ends.first.get(), SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
        near.push_back(std::move(ends.first));
        far.push_back(std::move(ends.second));
      }
      ranks[static_cast<std::size_t>(a)]->offer(streams_of(std::move(near), true), b);
      ranks[static_cast<std::size_t>(b)]->offer(streams_of(std::move(far), false), a);
    }
  for (auto& rank : ranks) rank->complete(Deadline::after(kTestSeconds));
  return ranks;
}

class Streams : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { links_are_sealed = GetParam(); }
  void TearDown() override { links_are_sealed = false; }
};

TEST_P(Streams, MessagesComeInTheOrderOfSending) {
  Transports ranks = connect_by_streams(2);
  std::mt19937 random(7);
  std::vector<std::size_t> sizes(300);
  for (auto& size : sizes) size = random() % 4 == 0 ? random() % kLargest : random() % 100;
  std::size_t sent = 0, received = 0;
  const Rank to[] = {1};
  while (received < sizes.size()) {
    while (sent < sizes.size() && try_send(*ranks[0], to, sizes[sent], sent)) ++sent;
    ranks[0]->flush();
    const auto message = ranks[1]->peek(0);
    if (!message) continue;
    ASSERT_EQ(message->size(), sizes[received]);
    ASSERT_TRUE(matches(*message, received));
    ranks[1]->release(0);
    ++received;
  }
  EXPECT_TRUE(ranks[0]->flush());
}

TEST_P(Streams, OneMessageGoesToSeveralPeersWhoseNumbersDiffer) {
  Transports ranks = connect_by_streams(3);
  send(*ranks[0], {1}, 40, 1);
  for (std::size_t seed = 2; seed < 40; ++seed) {
    send(*ranks[0], {1, 2}, 3000, seed);
    if (seed == 2) expect_message(*ranks[1], 0, 40, 1);
    for (const Rank peer : {1, 2})
      expect_message(*ranks[static_cast<std::size_t>(peer)], 0, 3000, seed);
  }
}

TEST_P(Streams, TheEndOfAnyStreamIsTheEndOfThePeer) {
  Transports ranks = connect_by_streams(2);
  send(*ranks[0], {1}, 40, 1);
  ranks[0].reset();
  expect_message(*ranks[1], 0, 40, 1);
  expect_end(*ranks[1], 0);
}

// The ends of a rank's streams, to be used one by one.
std::vector<UniqueFd> far_ends(Transport& near, int count, Rank peer) {
  std::vector<UniqueFd> own, far;
  for (int i = 0; i < count; ++i) {
    Ends ends = unix_ends();
    own.push_back(std::move(ends.first));
    far.push_back(std::move(ends.second));
  }
  near.offer(streams_of(std::move(own), true), peer);
  return far;
}

void put(const UniqueFd& to, std::size_t bytes, std::size_t seed, std::uint32_t number) {
  std::vector<std::byte> frame(frame_bytes(bytes));
  const Prefix prefix(bytes, number);
  std::memcpy(frame.data(), &prefix, sizeof prefix);
  fill(Bytes(frame).subspan(sizeof prefix, bytes), seed);
  ASSERT_EQ(::send(to.get(), frame.data(), frame.size(), 0), static_cast<ssize_t>(frame.size()));
}

TEST(EndsOfStreams, OneThatEndsFirstDoesNotHideWhatAnotherBringsLater) {
  Transports ranks(2);
  for (Rank rank = 0; rank < 2; ++rank)
    ranks[at(rank)] = make_transport("tcp", {.rank = rank, .size = 2, .max_message = kLargest});
  std::vector<UniqueFd> far = far_ends(*ranks[0], 2, 1);
  Ends hello = unix_ends();  // rank 1 says hello into it, which is passed on
  Ends unused = unix_ends();
  Connection theirs(std::move(hello.first));
  theirs.more.emplace_back(std::move(unused.first));
  ranks[1]->offer(std::move(theirs), 0);
  std::array<std::byte, 256> bytes;
  const ssize_t got = ::recv(hello.second.get(), bytes.data(), bytes.size(), 0);
  ASSERT_EQ(::send(far[0].get(), bytes.data(), static_cast<std::size_t>(got), 0), got);
  ranks[0]->complete(Deadline::after(kTestSeconds));
  far[1].reset();
  EXPECT_FALSE(ranks[0]->peek(1));
  put(far[0], 40, 1, 0);
  expect_message(*ranks[0], 1, 40, 1);
  far[0].reset();
  expect_end(*ranks[0], 1);
}

TEST(StreamsOfManyPeers, PeersThatDoNotReceiveLeaveRoomForOneThatDoes) {
  constexpr int kSize = 6;
  Transports ranks =
      connect_by_streams(kSize, {.messages = 4 * (kSize - 1), .messages_per_peer = 4});
  for (Rank silent = 1; silent < kSize - 1; ++silent) {
    const Rank to[] = {silent};
    for (int i = 0; i < 1000; ++i)
      if (!try_send(*ranks[0], to, kLargest, 1)) break;
  }
  send(*ranks[0], {kSize - 1}, 40, 2);
  expect_message(*ranks[kSize - 1], 0, 40, 2);
}

TEST(StreamNumbers, AFrameThatIsTooFarAheadIsForeign) {
  EXPECT_TRUE(Prefix(8, 5).valid(8, 5, kAhead));
  EXPECT_TRUE(Prefix(8, 5 + kAhead - 1).valid(8, 5, kAhead));
  EXPECT_FALSE(Prefix(8, 5 + kAhead).valid(8, 5, kAhead));
  EXPECT_FALSE(Prefix(8, 4).valid(8, 5, kAhead));
  EXPECT_TRUE(Prefix(8, 2).valid(8, ~0U, kAhead));  // numbers begin again after 2^32
}

INSTANTIATE_TEST_SUITE_P(PlainAndSealed, Streams, testing::Bool());

}  // namespace transport_streams_test
}  // namespace gradwire::transport
