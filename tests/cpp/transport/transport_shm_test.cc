#include "gradwire/transport/memory/arena.h"

#include <sys/resource.h>

#include <exception>
#include <set>

#include "transport_conformance.h"

namespace gradwire::transport {
INSTANTIATE_TEST_SUITE_P(Shm, TransportConformance, testing::Values("shm"));

TEST(Shm, SmallMessagesNeedNoStaging) {
  const Transports mesh =
      connect("shm", 3, {.max_message = 4096, .messages = 4, .messages_per_peer = 4});
  std::size_t large = 0, few = 0;
  while (try_send(*mesh[0], std::vector<Rank>{1}, 4096, large)) ++large;
  EXPECT_FALSE(try_send(*mesh[0], std::vector<Rank>{2}, kSmallMessage + 1, 0));
  while (try_send(*mesh[0], std::vector<Rank>{2}, kSmallMessage, few)) ++few;
  EXPECT_EQ(large, 4);
  EXPECT_EQ(few, 4);
  for (std::size_t i = 0; i < few; ++i) expect_message(*mesh[2], 0, kSmallMessage, i);
  EXPECT_FALSE(try_send(*mesh[0], std::vector<Rank>{1, 2}, 0, 9));  // rank 1 has its share
  EXPECT_TRUE(try_send(*mesh[0], std::vector<Rank>{2}, 0, 9));
}

// A cell that was just read is in the reader's cache: writing it again would bring it back.
TEST(Shm, CellsTakeTurns) {
  const Transports mesh = connect("shm", 2, {.max_message = 4096, .messages = 4});
  const std::vector<Rank> peers{1};
  std::vector<std::byte*> cells;
  for (std::size_t i = 0; i < 8; ++i) {
    const Bytes cell = mesh[0]->reserve(peers, 4096);
    cells.push_back(cell.data());
    fill(cell, i);
    mesh[0]->commit(4096);
    expect_message(*mesh[1], 0, 4096, i);
  }
  const std::set<std::byte*> few(cells.begin(), cells.begin() + 4);
  EXPECT_EQ(few.size(), 4);
  EXPECT_EQ(std::set<std::byte*>(cells.begin(), cells.end()), few);
}

// Descriptors that come where none is left are lost, and the kernel says so by MSG_CTRUNC alone.
TEST(Shm, AShortageOfDescriptorsIsTold) {
  const LinkOptions options{.size = 2};
  auto [one, other] = ends_for("shm");
  const auto left = make_transport("shm", options);
  LinkOptions mine = options;
  mine.rank = 1;
  const auto right = make_transport("shm", mine);
  left->offer(std::move(one), 1);
  right->offer(std::move(other), 0);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const int lowest = ::dup(0);  // no higher one is free
  ::close(lowest);
  const rlimit none{static_cast<rlim_t>(lowest), before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &none);
  std::exception_ptr thrown;
  try {
    right->complete(Deadline::after(10));
  } catch (...) {
    thrown = std::current_exception();
  }
  ::setrlimit(RLIMIT_NOFILE, &before);  // a sanitizer looks at an exception through a pipe
  try {
    if (thrown) std::rethrow_exception(thrown);
    ADD_FAILURE() << "it got a descriptor";
  } catch (const TransportError& error) {
    EXPECT_NE(std::string(error.what()).find("no file descriptor left"), std::string::npos);
  }
}

}  // namespace gradwire::transport
