#include "gradwire/transport/arena.h"
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

}  // namespace gradwire::transport
