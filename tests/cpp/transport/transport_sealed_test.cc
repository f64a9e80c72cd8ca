// tcp over sealed sockets: what every transport must do, and what a program in between can't.
#include "gradwire/transport/control.h"
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
      LinkOptions options{.rank = rank, .size = 2, .max_message = 1024};
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

// Has libcrypto encrypt and decrypt nothing while it lives, as without memory.
class FailingLibcrypto {
 public:
  FailingLibcrypto() {
    crypto::Libcrypto& library = crypto::replaceable_libcrypto();
    library.cipher_init = [](auto*, const auto*, auto*, const auto*, const auto*, int) {
      return 0;
    };
    library.cipher_final = [](auto*, auto*, int*) { return 0; };
  }
  ~FailingLibcrypto() { crypto::replaceable_libcrypto() = before_; }

 private:
  crypto::Libcrypto before_ = crypto::libcrypto();
};

TEST(SealedTcp, AMessageThatCannotBeEncryptedIsAnErrorThatNamesThePeer) {
  Between between;
  const auto expect_error = [&] {
    try {
      send(*between.ranks[0], {1}, 40, 1);
      ADD_FAILURE();
    } catch (const TransportError& error) {
      EXPECT_EQ(error.peer(), 1);
      EXPECT_NE(std::string(error.what()).find("libcrypto failed"), std::string::npos);
    }
  };
  {
    const FailingLibcrypto failing;
    expect_error();
  }
  expect_error();  // no message may follow the one that is missing
  between.ranks[0].reset();
  EXPECT_EQ(between.sent(), "");
}

TEST(SealedTcp, AMessageThatCannotBeDecryptedForWantOfMemoryIsAnErrorThatNamesThePeer) {
  Between between;
  between.deliver(message_of(between, 1));
  const FailingLibcrypto failing;
  expect_end(*between.ranks[1], 0);
}

struct Controls {
  Controls() {
    Ends ends = tcp_ends();
    one.adopt(with_keys(std::move(ends.first), true), 1);
    other.adopt(with_keys(std::move(ends.second), false), 0);
  }
  static ControlEvent next(Control& control) {
    pollfd bell{control.doorbell(), POLLIN, 0};
    for (;;) {
      if (auto event = control.poll()) return *event;
      if (::poll(&bell, 1, 60'000) != 1) throw Timeout("no control event", kNoPeer);
    }
  }

  Control one{0, 2}, other{1, 2};
};

TEST(SealedControl, AFrameThatCannotBeEncryptedIsThePeersEndAndNoCrash) {
  Controls controls;
  {
    const FailingLibcrypto failing;
    EXPECT_TRUE(controls.one.send(1, {}));
  }
  EXPECT_TRUE(controls.one.send(1, {}));  // to nobody: none may follow the one that is missing
  const ControlEvent end = Controls::next(controls.one);
  EXPECT_TRUE(end.gone);
  EXPECT_EQ(end.frame.culprit, 1);
  EXPECT_NE(text_of(end.frame).find("rank 1 is gone: libcrypto could not encrypt"),
            std::string::npos)
      << text_of(end.frame);
  EXPECT_FALSE(controls.one.connected(1));
  EXPECT_TRUE(Controls::next(controls.other).gone);
}

TEST(SealedControl, AFrameThatCannotBeDecryptedForWantOfMemoryIsThePeersEnd) {
  Controls controls;
  controls.one.send(1, {});
  const FailingLibcrypto failing;
  const ControlEvent end = Controls::next(controls.other);
  EXPECT_TRUE(end.gone);
  EXPECT_NE(text_of(end.frame).find("rank 0 is gone: libcrypto failed"), std::string::npos);
}

TEST(SealedControl, AFlippedBitIsThePeersEnd) {
  Ends near = tcp_ends(), far = tcp_ends();
  Control sender(0, 2), receiver(1, 2);
  sender.adopt(with_keys(std::move(near.first), true), 1);
  receiver.adopt(with_keys(std::move(far.second), false), 0);
  ASSERT_TRUE(sender.send(1, {}));
  std::string wire(2048, '\0');
  wire.resize(static_cast<std::size_t>(::recv(near.second.get(), wire.data(), wire.size(), 0)));
  wire[100] = static_cast<char>(wire[100] ^ 1);
  ASSERT_EQ(::send(far.first.get(), wire.data(), wire.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(wire.size()));
  const ControlEvent end = Controls::next(receiver);
  EXPECT_TRUE(end.gone);
  EXPECT_NE(text_of(end.frame).find(crypto::kChanged), std::string::npos) << text_of(end.frame);
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Sealed, TransportConformance, testing::Values("tcp", "emulated"));

}  // namespace gradwire::transport
