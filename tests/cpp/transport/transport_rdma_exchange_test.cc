// What the other end says of its ports and of its end of a link is checked before it is used.
#include "gradwire/transport/rdma/rdma_exchange.h"

#include <cstring>
#include <functional>

#include "gradwire/transport/handshake.h"
#include "gradwire/transport/rdma/rdma_rail.h"
#include "rdma_fake.h"

namespace gradwire::transport {
namespace transport_rdma_exchange_test {

constexpr LinkId kLink{"rdma", 0, 1};
constexpr double kShort = 0.05;
using Message = std::vector<std::byte>;

// What a function that sends says.
template <typename Send>
Message said_by(Send send) {
  const Ends ends = unix_ends();
  send(ends.first.get());
  Message message(4096);
  const ssize_t got = ::recv(ends.second.get(), message.data(), message.size(), MSG_DONTWAIT);
  message.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return message;
}

template <typename Number>
Message with(Message message, std::size_t at, Number value) {
  std::memcpy(message.data() + at, &value, sizeof value);
  return message;
}

// Where the fields of the messages are.
constexpr std::size_t kMagicAt = 0, kCountAt = 4, kFirstAddressAt = 8, kAddressBytes = 88;
constexpr std::size_t kNetworkAt = 16, kNetworkBytes = 64, kLayerAt = 82, kMtuAt = 83;
constexpr std::size_t kPortAt = 4, kPeerPortAt = 8, kNumberAt = 12, kPacketAt = 16, kSlotsAt = 20;

RdmaPort some_port(std::uint8_t nth) {
  RdmaPort port;
  port.address = {.gid = {0xfe, 0x80, nth},
                  .lid = nth,
                  .link_layer = ibv::kLinkEthernet,
                  .mtu = ibv::kMtu2048,
                  .network = "ethernet " + std::to_string(nth)};
  return port;
}
Message ports_message(std::size_t count = 3) {
  std::vector<RdmaPort> ports;
  for (std::size_t i = 0; i < count; ++i) ports.push_back(some_port(static_cast<std::uint8_t>(i)));
  return said_by([&](int socket) { send_ports(socket, kLink, ports); });
}
const RdmaEnd kEnd{.port = 2,
                   .peer_port = 15,
                   .number = 0xabcdef,
                   .first_packet = 0x123456,
                   .slots = 8,
                   .key = 0xfeedbeef,
                   .ring = 0x7fff00001000};
Message end_message(const RdmaEnd& end = kEnd) {
  return said_by([&](int socket) { send_value(socket, end, kLink); });
}

void say(int socket, const Message& message) {
  send_all(socket, message, kLink, Deadline::after(kTestSeconds));
}
template <typename Receive>
auto heard_of(const Message& message, Receive receive) {
  const Ends ends = unix_ends();
  say(ends.first.get(), message);
  return receive(ends.second.get(), kLink, Deadline::after(kTestSeconds));
}

template <typename Receive>
void expect_refused(const Message& message, Receive receive, const std::string& words) {
  try {
    heard_of(message, receive);
    ADD_FAILURE() << "accepted: " << words;
  } catch (const TransportError& error) {
    EXPECT_EQ(error.peer(), 1);
    expect_words(error.what(), {"rank 0: rdma link to rank 1", words});
  }
}

TEST(RdmaExchange, PortsArriveAsTheyWereSent) {
  for (std::size_t count : {0U, 1U, 16U}) {
    const auto heard = heard_of(ports_message(count), receive_ports);
    ASSERT_EQ(heard.size(), count);
    for (std::size_t i = 0; i < count; ++i)
      EXPECT_EQ(heard[i], some_port(static_cast<std::uint8_t>(i)).address);
  }
}

TEST(RdmaExchange, OfManyPortsTheFirstSixteenAreTold) {
  EXPECT_EQ(heard_of(ports_message(20), receive_ports).size(), 16U);
}

TEST(RdmaExchange, ALongNetworkIsCutShort) {
  RdmaPort port = some_port(0);
  port.address.network.assign(200, 'n');
  const Message message = said_by([&](int socket) { send_ports(socket, kLink, {&port, 1}); });
  EXPECT_EQ(heard_of(message, receive_ports)[0].network, std::string(kNetworkBytes - 1, 'n'));
}

TEST(RdmaExchange, AnEndArrivesAsItWasSent) {
  const RdmaEnd heard = heard_of(end_message(), receive_end);
  EXPECT_EQ(heard.port, kEnd.port);
  EXPECT_EQ(heard.peer_port, kEnd.peer_port);
  EXPECT_EQ(heard.number, kEnd.number);
  EXPECT_EQ(heard.first_packet, kEnd.first_packet);
  EXPECT_EQ(heard.ring, kEnd.ring);
  EXPECT_EQ(heard.key, kEnd.key);
  EXPECT_EQ(heard.slots, kEnd.slots);
}

// What both ends say where the socket is sealed, as it goes over the wire, and the other end's
// keys.
struct Sealed {
  Sealed() {
    crypto::Seal sender(crypto::Cipher::kAes128Gcm, one, other);
    const std::array ports{some_port(0), some_port(1)};
    send_ports({ends.first.get(), &sender}, kLink, ports);
    send_value({ends.first.get(), &sender}, kEnd, kLink);
    wire = said_by([&](int socket) {
      Message bytes(8192);
      bytes.resize(static_cast<std::size_t>(
          std::max<ssize_t>(::recv(ends.second.get(), bytes.data(), bytes.size(), 0), 0)));
      say(socket, bytes);
    });
  }
  const crypto::Key one{crypto::bytes_of("0123456789abcdef0123456789abcdef")};
  const crypto::Key other{crypto::bytes_of("fedcba9876543210fedcba9876543210")};
  Ends ends = unix_ends();
  Message wire;
  crypto::Seal seal{crypto::Cipher::kAes128Gcm, other, one};
};

TEST(RdmaExchange, OverASealedSocketNothingShows) {
  Sealed said;
  const std::string_view text(reinterpret_cast<const char*>(said.wire.data()), said.wire.size());
  EXPECT_EQ(text.find("ethernet"), std::string_view::npos);
  heard_of(said.wire, [&](int socket, const LinkId& link, const WaitLimit& limit) {
    const auto heard = receive_ports({socket, &said.seal}, link, limit);
    EXPECT_EQ(heard.size(), 2U);
    EXPECT_EQ(heard.at(1), some_port(1).address);
    EXPECT_EQ(receive_end({socket, &said.seal}, link, limit).key, kEnd.key);
  });
}

TEST(RdmaExchange, OverASealedSocketAFlippedBitIsRefused) {
  const std::size_t bytes = Sealed().wire.size();
  for (std::size_t at = 4; at < bytes; at += 97) {  // behind the length: a longer one waits
    Sealed said;
    said.wire[at] ^= std::byte{8};
    expect_refused(
        said.wire,
        [&](int socket, const LinkId& link, const WaitLimit& limit) {
          receive_ports({socket, &said.seal}, link, limit);
          receive_end({socket, &said.seal}, link, limit);
        },
        crypto::kChanged);
  }
}

TEST(RdmaExchange, AnotherProtocolIsRefused) {
  expect_refused(with(ports_message(), kMagicAt, 0x32505247U), receive_ports, "protocol");
  expect_refused(with(end_message(), kMagicAt, 0U), receive_end, "protocol");
  Message ports = ports_message();
  expect_refused(ports, receive_end, "protocol");
}

TEST(RdmaExchange, ImpossiblePortsAreRefused) {
  const Message message = ports_message();
  const auto second = [](std::size_t field) { return kFirstAddressAt + kAddressBytes + field; };
  for (std::uint32_t count : {17U, 0x80000000U, ~0U})
    expect_refused(with(message, kCountAt, count), receive_ports, "number of RDMA ports");
  for (std::uint8_t layer : std::array<std::uint8_t, 3>{0, 3, 255})
    expect_refused(with(message, second(kLayerAt), layer), receive_ports, "impossible RDMA port");
  for (std::uint8_t mtu : std::array<std::uint8_t, 3>{0, 6, 255})
    expect_refused(with(message, second(kMtuAt), mtu), receive_ports, "impossible RDMA port");
  std::array<char, kNetworkBytes> endless;
  endless.fill('n');
  expect_refused(with(message, second(kNetworkAt), endless), receive_ports, "impossible RDMA port");
}

TEST(RdmaExchange, WhatLiesBeyondTheCountIsNotLookedAt) {
  const Message message =
      with(ports_message(1), kFirstAddressAt + kAddressBytes + kMtuAt, std::uint8_t{9});
  EXPECT_EQ(heard_of(message, receive_ports).size(), 1U);
}

TEST(RdmaExchange, ImpossibleEndsAreRefused) {
  const Message message = end_message();
  for (std::size_t field : {kPortAt, kPeerPortAt})
    for (std::uint32_t port : {16U, ~0U})
      expect_refused(with(message, field, port), receive_end, "impossible RDMA connection");
  for (std::size_t field : {kNumberAt, kPacketAt})
    for (std::uint32_t number : {1U << 24, ~0U})
      expect_refused(with(message, field, number), receive_end, "impossible RDMA connection");
  for (std::uint32_t slots : {0U, 3U, 6U, 1U << 17, ~0U})
    expect_refused(with(message, kSlotsAt, slots), receive_end, "impossible RDMA connection");
}

TEST(RdmaExchange, AnEndMidwayIsAnEndAndSilenceATimeout) {
  for (std::size_t bytes : {0U, 1U, 39U}) {
    Ends ends = unix_ends();
    Message part = end_message();
    part.resize(bytes);
    say(ends.first.get(), part);
    const auto check_failure = [&](auto receive) {
      receive(ends.second.get(), kLink, WaitLimit(Deadline::after(kShort)));
    };
    thrown_by<Timeout>([&] { check_failure(receive_end); });
    thrown_by<Timeout>([&] { check_failure(receive_ports); });
    ends.first.reset();
    thrown_by<TransportError>([&] { check_failure(receive_end); });
    thrown_by<TransportError>([&] { check_failure(receive_ports); });
  }
}

// --- through a transport ---

// A link whose other end is spoken by hand. It says hello and its ports, and then what it is told.
class RdmaByHand : public FakeRdma {
 protected:
  static constexpr Rank kPeer = 1;

  // The error of `self`, a rank of two.
  template <typename Kind>
  std::string error_of(Rank self, const std::vector<Message>& words, double seconds = kTestSeconds,
                       bool closes = false) {
    Ends ends = tcp_ends();
    const Rank peer = 1 - self;
    const LinkId back{"rdma", peer, self};
    const LinkOptions mine = of_rank(self, options());
    send_hello(ends.second.get(), back, of_rank(peer, mine));
    for (const Message& message : words) say(ends.second.get(), message);
    if (closes) ::shutdown(ends.second.get(), SHUT_WR);
    const auto transport = make_transport("rdma", mine);
    return thrown_by<Kind>([&] {
      try {
        transport->adopt(std::move(ends.first), peer, seconds);
      } catch (const PeerError& error) {
        EXPECT_EQ(error.peer(), peer);
        throw;
      }
    });
  }
  static Message end_of(int port, int peer_port) {
    RdmaEnd end = kEnd;
    end.port = port;
    end.peer_port = peer_port;
    return end_message(end);
  }
};

TEST_F(RdmaByHand, PortsThatThereAreNotAreRefused) {
  for (Rank self : {0, 1})
    for (const auto& [port, peer_port] : {std::pair{3, 0}, std::pair{0, 1}})
      expect_words(error_of<TransportError>(self, {ports_message(3), end_of(port, peer_port)}),
                   {"chose an RDMA port that there is not"});
}

TEST_F(RdmaByHand, WithoutAPortOfOneLinkLayerTheRemedyIsTold) {
  const std::vector<Message> infiniband = {
      with(ports_message(1), kFirstAddressAt + kLayerAt, std::uint8_t{ibv::kLinkInfiniBand})};
  for (const auto& words : {infiniband, {ports_message(0)}})
    expect_words(error_of<InvalidArgument>(0, words), {"no RDMA port", "GRADWIRE_IB_HCA"});
  EXPECT_EQ(fake.calls("ibv_create_qp"), 0);
}

// The peer stops or ends after each of its words; in the last case it never greets.
TEST_F(RdmaByHand, SilenceIsATimeoutAndAnEndIsAnEnd) {
  const std::vector<std::vector<Message>> beginnings = {
      {}, {ports_message()}, {ports_message(), end_of(0, 0)}};
  for (Rank self : {0, 1})
    for (const auto& words : beginnings) {
      expect_words(error_of<Timeout>(self, words, kShort), {"timed out", "without an answer"});
      expect_words(error_of<TransportError>(self, words, kTestSeconds, true), {"closed it"});
    }
}

TEST_F(RdmaByHand, APeerThatTheNetworkDoesNotReachIsAnErrorWithTheRemedy) {
  for (Rank self : {0, 1})
    expect_words(error_of<TransportError>(self, {ports_message(), end_of(0, 0), {std::byte{'R'}}}),
                 {"does not reach the other end", "retry counter exceeded", "GRADWIRE_IB_GID_INDEX",
                  "GRADWIRE_TRANSPORT=shm,tcp"});
}

// Its NIC acknowledges what is written to it, but the peer itself says nothing: it was stopped.
TEST_F(RdmaByHand, APeerThatIsReachedAndNeverGreetsIsATimeout) {
  const LinkOptions mine = of_rank(0, options());
  const auto rdma = std::dynamic_pointer_cast<RdmaDevices>(mine.context);
  const RdmaPort& port = rdma->ports()[0];
  const LinkId back{"rdma", kPeer, 0};
  Slab slab(4096);
  const Rail rail(*rdma, port, slab, 64);
  QueuePair stopped(*rdma, port, rail.cq(), 1, 1);
  ASSERT_TRUE(stopped.post_receive(0));
  Ends ends = tcp_ends();
  send_hello(ends.second.get(), back, of_rank(kPeer, mine));
  run_threads(2, [&](int side) {
    if (side == 0) {
      const auto transport = make_transport("rdma", mine);
      expect_words(thrown_by<Timeout>([&] { transport->adopt(std::move(ends.first), kPeer, 1); }),
                   {"rank 1", "no word over RDMA"});
      return;
    }
    const WaitLimit wait_limit = Deadline::after(kTestSeconds);
    receive_hello(ends.second.get(), back, of_rank(kPeer, mine), wait_limit);
    send_ports(ends.second.get(), back, rdma->ports());
    receive_ports(ends.second.get(), back, wait_limit);
    const RdmaEnd far = receive_end(ends.second.get(), back, wait_limit);
    RdmaEnd own = kEnd;
    own.port = own.peer_port = 0;
    own.number = stopped.number();
    send_value(ends.second.get(), own, back);
    stopped.connect(far.number, far.first_packet, port.address, own.first_packet);
    say(ends.second.get(), {std::byte{'R'}});
  });
}

TEST_F(RdmaByHand, NothingIsRegisteredForAPeerThatSaysNothingSensible) {
  error_of<TransportError>(0, {with(ports_message(), kMagicAt, 0U)});
  EXPECT_EQ(fake.calls("ibv_create_qp"), 0);
  EXPECT_EQ(fake.calls("ibv_create_cq"), 0);
}

}  // namespace transport_rdma_exchange_test
}  // namespace gradwire::transport
