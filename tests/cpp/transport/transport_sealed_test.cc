// tcp over sealed sockets: what every transport must do, and what a program in between can't.
#include "transport_conformance.h"

namespace gradwire::transport {
namespace {

const bool kSealed = links_are_sealed = true;

// Two ranks, and a socket pair between them of which this test passes on what it wants.
class Between {
 public:
  Between() {
    std::tie(sockets_[0], near_) = tcp_ends();
    std::tie(sockets_[1], far_) = tcp_ends();
    for (const Rank rank : {0, 1}) {
      Options options{.rank = rank, .size = 2, .max_message = 1024};
      ranks[rank] = make_transport("tcp", options);
      ranks[rank]->offer(with_keys(std::move(sockets_[rank]), rank == 0), 1 - rank);
    }
    pass_on(near_, far_);
    pass_on(far_, near_);
    for (const auto& rank : ranks) rank->complete(Deadline::after(kTestSeconds));
  }

  // What rank 0 has sent, as it goes over the wire.
  std::string sent() const {
    std::string bytes(1 << 16, '\0');
    const ssize_t got = ::recv(near_.get(), bytes.data(), bytes.size(), 0);
    bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    return bytes;
  }
  void deliver(std::string_view bytes) const {
    ASSERT_EQ(::send(far_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void hang_up() { far_.reset(); }

  std::unique_ptr<Transport> ranks[2];

 private:
  static void pass_on(const UniqueFd& from, const UniqueFd& to) {
    char bytes[256];
    const ssize_t got = ::recv(from.get(), bytes, sizeof bytes, 0);
    ASSERT_GT(got, 0);
    ASSERT_EQ(::send(to.get(), bytes, static_cast<std::size_t>(got), 0), got);
  }

  UniqueFd sockets_[2], near_, far_;
};

std::string message_of(Between& between, std::size_t seed) {
  send(*between.ranks[0], {1}, 40, seed);
  return between.sent();
}

TEST(SealedTcp, HidesWhatItSends) {
  Between between;
  std::string plain(40, '\0');
  fill(std::as_writable_bytes(std::span(plain)), 1);
  const std::string wire = message_of(between, 1);
  EXPECT_EQ(wire.find(plain.substr(0, 8)), std::string::npos);
  EXPECT_EQ(wire.size(), 8 + 40 + 16);
  between.deliver(wire);
  expect_message(*between.ranks[1], 0, 40, 1);
}

TEST(SealedTcp, AFlippedBitIsAnErrorThatNamesThePeer) {
  for (std::size_t byte = 0; byte < 64; ++byte) {
    Between between;
    std::string wire = message_of(between, 1);
    wire[byte] = static_cast<char>(wire[byte] ^ 4);
    between.deliver(wire);
    expect_end(*between.ranks[1], 0);
  }
}

TEST(SealedTcp, AnotherLengthIsAnError) {
  Between between;
  std::string wire = message_of(between, 1);
  const std::uint32_t length = 32, check = ~length;
  std::memcpy(wire.data(), &length, sizeof length);
  std::memcpy(wire.data() + 4, &check, sizeof check);
  between.deliver(wire);
  expect_end(*between.ranks[1], 0);
}

TEST(SealedTcp, ARepeatedMessageIsAnError) {
  Between between;
  const std::string wire = message_of(between, 1);
  between.deliver(wire + wire);
  expect_message(*between.ranks[1], 0, 40, 1);
  expect_end(*between.ranks[1], 0);
}

TEST(SealedTcp, ADroppedMessageIsAnError) {
  Between between;
  message_of(between, 1);
  between.deliver(message_of(between, 2));
  expect_end(*between.ranks[1], 0);
}

TEST(SealedTcp, ReorderedMessagesAreAnError) {
  Between between;
  const std::string first = message_of(between, 1);
  between.deliver(message_of(between, 2) + first);
  expect_end(*between.ranks[1], 0);
}

TEST(SealedTcp, ATruncatedMessageIsAnError) {
  Between between;
  between.deliver(message_of(between, 1).substr(0, 63));
  between.hang_up();
  expect_end(*between.ranks[1], 0);
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Sealed, TransportConformance, testing::Values("tcp", "emulated"));

}  // namespace gradwire::transport
