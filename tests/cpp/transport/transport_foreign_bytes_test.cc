// What arrives from a peer is checked before it is used: frames of a stream, memory, descriptors.
#include <fcntl.h>
#include <sys/mman.h>

#include <cstring>

#include "gradwire/transport/handshake.h"
#include "gradwire/transport/memory/arena.h"
#include "gradwire/transport/tcp_frames.h"
#include "transport_harness.h"

namespace gradwire::transport {
namespace transport_foreign_bytes_test {

constexpr LinkId kLink{"test", 0, 1};
const LinkOptions kOptions{.rank = 0, .size = 2, .max_message = 1024, .messages = 2};

std::vector<std::byte> frame_with(std::size_t bytes, std::size_t seed) {
  std::vector<std::byte> frame(frame_bytes(bytes));
  const Prefix prefix(bytes);
  std::memcpy(frame.data(), &prefix, sizeof prefix);
  fill(Bytes(frame).subspan(sizeof prefix, bytes), seed);
  return frame;
}

std::vector<std::byte> stream_of(const std::vector<std::size_t>& lengths) {
  std::vector<std::byte> stream;
  for (std::size_t bytes : lengths) {
    const auto frame = frame_with(bytes, bytes);
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  return stream;
}

LinkOptions options_of_rank(Rank rank) {
  LinkOptions options = kOptions;
  options.rank = rank;
  return options;
}

// Rank 0's transport and the other end of its link to rank 1, spoken by hand: past the hello, then
// what `more` says.
struct ByHand {
  template <typename More>
  ByHand(std::string_view kind, Ends ends, More more)
      : transport(make_transport(kind, kOptions)), socket(std::move(ends.second)) {
    run_threads(2, [&](int side) {
      if (side == 0) return transport->adopt(std::move(ends.first), 1, kTestSeconds);
      const LinkId back{kind, 1, 0};
      send_hello(socket.get(), back, options_of_rank(1));
      receive_hello(socket.get(), back, options_of_rank(1), Deadline::after(kTestSeconds));
      more(socket.get(), back);
    });
  }
  ByHand() : ByHand("tcp", tcp_ends(), [](int, const LinkId&) {}) {}

  void say(ConstBytes bytes) {
    send_all(socket.get(), bytes, kLink, Deadline::after(kTestSeconds));
  }

  std::unique_ptr<Transport> transport;
  UniqueFd socket;
};

TEST(Inbox, ABoundaryMayFallAnywhere) {
  const std::vector<std::size_t> lengths = {0, 1, 8, 9, 1024, 3, 1023, 0, 512};
  const std::vector<std::byte> stream = stream_of(lengths);
  for (std::size_t piece : {1U, 2U, 7U, 8U, 100U, 1031U, 5000U}) {
    Inbox inbox(kOptions.max_message);
    std::size_t fed = 0;
    for (std::size_t bytes : lengths) {
      std::optional<ConstBytes> message;
      while (!(message = inbox.front(kLink))) {
        const Bytes room = inbox.room();
        const std::size_t now = std::min({piece, room.size(), stream.size() - fed});
        ASSERT_GT(now, 0U);
        std::memcpy(room.data(), stream.data() + fed, now);
        inbox.received(now);
        fed += now;
      }
      EXPECT_EQ(message->size(), bytes);
      EXPECT_TRUE(matches(*message, bytes));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(message->data()) % 8, 0U);
      inbox.pop();
    }
    EXPECT_TRUE(inbox.empty());
  }
}

TEST(Inbox, ImpossibleLengthsNameThePeer) {
  for (const Prefix& prefix : {Prefix(kOptions.max_message + 1), [] {
                                 Prefix garbled(10);
                                 garbled.check ^= 1;
                                 return garbled;
                               }()}) {
    Inbox inbox(kOptions.max_message);
    std::memcpy(inbox.room().data(), &prefix, sizeof prefix);
    inbox.received(sizeof prefix);
    try {
      inbox.front(kLink);
      ADD_FAILURE() << "accepted a length of " << prefix.length;
    } catch (const TransportError& error) {
      EXPECT_EQ(error.peer(), 1);
    }
  }
}

TEST(Tcp, AnEndMidwayThroughAMessageIsAnEnd) {
  ByHand peer;
  auto stream = stream_of({100, 1000});
  stream.pop_back();
  peer.say(stream);
  peer.socket.reset();
  expect_message(*peer.transport, 1, 100, 100);
  expect_end(*peer.transport, 1);
}

// A packet that brings no frame would wake this rank for nothing.
TEST(Tcp, TheDoorbellRingsForTheRestOfAFrame) {
  ByHand peer;
  Transport& transport = *peer.transport;
  const std::vector<std::byte> frame = stream_of({1000});
  const auto sleeps_for = [&](int milliseconds) {
    transport.arm();
    const bool rung = transport.peek(1).has_value() || rings(transport, milliseconds);
    transport.disarm();
    return !rung;
  };
  peer.say(ConstBytes(frame).first(100));
  for (int i = 0; i < 2; ++i) sleeps_for(/*milliseconds=*/20);  // until these are read
  peer.say(ConstBytes(frame).subspan(100, 800));
  EXPECT_TRUE(sleeps_for(20));
  peer.say(ConstBytes(frame).subspan(900));
  expect_message(transport, 1, 1000, 1000);
}

TEST(Tcp, ForeignBytesNameThePeer) {
  ByHand peer;
  const std::string_view request = "GET / HTTP/1.1\r\n\r\n";
  peer.say(std::as_bytes(std::span(request)));
  expect_end(*peer.transport, 1);
}

UniqueFd memory_of(std::size_t bytes, int seals) {
  UniqueFd memory(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(memory.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(::fcntl(memory.get(), F_ADD_SEALS, seals), 0);
  return memory;
}

TEST(Arena, OnlyThePeersOwnSealedArenaIsMapped) {
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const auto genuine = Arena::create(options_of_rank(1));
  const auto size = static_cast<std::size_t>(::lseek(genuine->descriptor(), 0, SEEK_END));
  const auto another = Arena::create(options_of_rank(0));
  EXPECT_NO_THROW(Arena::map(UniqueFd(::dup(genuine->descriptor())), kLink, kOptions));
  EXPECT_THROW(Arena::map(UniqueFd(::dup(another->descriptor())), kLink, kOptions), TransportError);
  EXPECT_THROW(Arena::map(memory_of(size, 0), kLink, kOptions), TransportError);
  EXPECT_THROW(Arena::map(memory_of(size, kSeals), kLink, kOptions), TransportError);
  EXPECT_THROW(Arena::map(memory_of(size - 1, kSeals), kLink, kOptions), TransportError);
  EXPECT_THROW(Arena::map(UniqueFd(::open("/dev/null", O_RDWR)), kLink, kOptions), TransportError);
}

TEST(Arena, APeerCanNotShrinkIt) {
  const auto arena = Arena::create(kOptions);
  EXPECT_NE(::ftruncate(arena->descriptor(), 0), 0);
}

// Rank 0 over inproc, and its arena, for that of rank 1.
struct Swapped {
  std::shared_ptr<Arena> arena;
  ByHand by_hand;
};

Swapped swapped_for(const std::shared_ptr<Arena>& gift) {
  std::shared_ptr<Arena> taken;
  ByHand by_hand("inproc", unix_ends(), [&](int socket, const LinkId& back) {
    const Deadline deadline = Deadline::after(kTestSeconds);
    const auto* mine = std::make_unique<std::shared_ptr<Arena>>(gift).release();
    std::shared_ptr<Arena>* theirs = nullptr;
    send_all(socket, std::as_bytes(std::span(&mine, 1)), back, deadline);
    receive_all(socket, std::as_writable_bytes(std::span(&theirs, 1)), back, deadline);
    taken = *std::unique_ptr<std::shared_ptr<Arena>>(theirs);
  });
  return {std::move(taken), std::move(by_hand)};
}

TEST(Arena, ImpossibleDescriptorsNameThePeer) {
  const auto arena = Arena::create(options_of_rank(1));
  const Swapped peer = swapped_for(arena);
  for (std::uint64_t word : {Descriptor::pack(2, 8), Descriptor::pack(-2, 8),
                             Descriptor::pack(0, kOptions.max_message + 1),
                             Descriptor::pack(Descriptor::kInEntry, kSmallMessage + 1)}) {
    arena->entry(0, 0).store(word);
    try {
      peer.by_hand.transport->peek(1);
      ADD_FAILURE() << "accepted descriptor " << word;
    } catch (const TransportError& error) {
      EXPECT_EQ(error.peer(), 1);
    }
  }
  arena->entry(0, 0).store(Descriptor::pack(1, 8));
  EXPECT_EQ(peer.by_hand.transport->peek(1)->data(), arena->data(1));
  peer.by_hand.transport->release(1);
  arena->entry(0, 1).store(Descriptor::pack(Descriptor::kInEntry, kSmallMessage));
  EXPECT_EQ(peer.by_hand.transport->peek(1)->data(), arena->small(0, 1));
}

// Any word of the reader's but zero; and what is small is not worth it.
TEST(Arena, AReaderThatIsFarHasItsMessagesStreamed) {
  const Swapped peer = swapped_for(Arena::create(options_of_rank(1)));
  const Rank peers[] = {1};
  Transport& sender = *peer.by_hand.transport;
  for (std::uint32_t word : {0U, 1U, 0xffffffffU, 0U}) {
    peer.arena->far(1).store(word);
    ASSERT_NE(sender.reserve(peers, kOptions.max_message).data(), nullptr);
    EXPECT_EQ(sender.copy(), word == 0 ? copy_cached : copy_streaming) << word;
    ASSERT_NE(sender.reserve(peers, kSmallMessage).data(), nullptr);
    EXPECT_EQ(sender.copy(), copy_cached);
  }
}

TEST(Registry, UnknownNamesAndOptionsOutOfRangeSaySo) {
  for (const TransportKind* kind : transport_kinds())
    EXPECT_NO_THROW(open_transport(kind->name, {}));
  EXPECT_THROW(make_transport("carrier_pigeon", kOptions), InvalidArgument);
  EXPECT_THROW(open_transport("carrier_pigeon", {}), InvalidArgument);
  std::vector<LinkOptions> wrong(5, kOptions);
  wrong[0].rank = 2;
  wrong[1].max_message = 0;
  wrong[2].messages = 0;
  wrong[3].max_message = std::size_t{1} << 40;
  wrong[4].messages_per_peer = 0;
  for (const LinkOptions& options : wrong)
    EXPECT_THROW(make_transport("tcp", options), InvalidArgument);
}

TEST(Registry, SharedMemoryNeedsAUnixSocket) {
  Ends ends = tcp_ends();
  UniqueFd sockets[2] = {std::move(ends.first), std::move(ends.second)};
  run_threads(2, [&](Rank rank) {
    const auto self = make_transport("shm", options_of_rank(rank));
    EXPECT_THROW(self->adopt(std::move(sockets[rank]), 1 - rank, kTestSeconds), InvalidArgument);
  });
}

}  // namespace transport_foreign_bytes_test
}  // namespace gradwire::transport
