#include <gtest/gtest.h>

#include "exec_ranks.h"
#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace exec_point_to_point_test {

using Bytes = std::vector<unsigned char>;

Bytes message(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<unsigned char>(i * 31 + static_cast<std::size_t>(seed));
  return bytes;
}

std::byte* data(Bytes& bytes) { return reinterpret_cast<std::byte*>(bytes.data()); }

class PointToPointTest : public testing::TestWithParam<const char*> {};

TEST_P(PointToPointTest, MessagesOfAPairKeepTheirOrder) {
  Ranks ranks(2, GetParam());
  ranks.run([](Communicator& comm) {
    std::vector<Bytes> all;
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 50; ++i) all.push_back(message(static_cast<std::size_t>(i * i * 100), i));
    auto received = all;
    for (auto& each : received) std::fill(each.begin(), each.end(), 0);
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (comm.identity().rank == 0)
        works.push_back(comm.send(data(all[i]), all[i].size(), 1, 30));
      else
        works.push_back(comm.receive(data(received[i]), received[i].size(), 0, 30));
    }
    for (auto& work : works) comm.wait(*work, 30);
    if (comm.identity().rank == 1) {
      EXPECT_EQ(received, all);
    }
  });
}

TEST_P(PointToPointTest, AllExchangeLargeMessagesAtOnce) {
  Ranks ranks(4, GetParam());
  ranks.run([](Communicator& comm) {
    const Rank me = comm.identity().rank;
    Bytes mine = message(3000000, me);
    std::vector<Bytes> got(4, Bytes(mine.size()));
    std::vector<std::shared_ptr<Work>> works;
    for (Rank peer = 0; peer < 4; ++peer)
      if (peer != me) works.push_back(comm.send(data(mine), mine.size(), peer, 30));
    for (Rank peer = 0; peer < 4; ++peer)
      if (peer != me)
        works.push_back(
            comm.receive(data(got[static_cast<std::size_t>(peer)]), mine.size(), peer, 30));
    for (auto& work : works) comm.wait(*work, 30);
    for (Rank peer = 0; peer < 4; ++peer)
      if (peer != me) {
        EXPECT_EQ(got[static_cast<std::size_t>(peer)], message(mine.size(), peer));
      }
  });
}

TEST_P(PointToPointTest, WhoDoesNotReceiveHoldsUpNobodyElse) {
  Ranks ranks(3, GetParam());
  ranks.run([](Communicator& comm) {
    Bytes big = message(20000000, 1), small = message(100, 2), token(1);
    switch (comm.identity().rank) {
      case 0: {  // to 1, which does not receive before 2 has its message
        const auto first = comm.send(data(big), big.size(), 1, 30);
        const auto second = comm.send(data(small), small.size(), 2, 30);
        comm.wait(*second, 30);
        comm.wait(*first, 30);
        break;
      }
      case 1:
        comm.wait(*comm.receive(data(token), 1, 2, 30), 30);
        comm.wait(*comm.receive(data(big), big.size(), 0, 30), 30);
        EXPECT_EQ(big, message(big.size(), 1));
        break;
      default:
        comm.wait(*comm.receive(data(small), small.size(), 0, 30), 30);
        comm.wait(*comm.send(data(token), 1, 1, 30), 30);
    }
  });
}

TEST_P(PointToPointTest, ASendIsOverThoughAnotherPeerDoesNotRead) {
  Ranks ranks(3, GetParam());
  ranks.run([](Communicator& comm) {
    Bytes big = message(20000000, 1), small = message(100, 2);
    if (comm.identity().rank == 0) {
      const auto stuck = comm.send(data(big), big.size(), 2, 30);
      comm.wait(*comm.send(data(small), small.size(), 1, 30), 30);
      EXPECT_GT(comm.traffic().bytes_sent, small.size());
      comm.wait(*comm.send(data(small), 1, 1, 30), 30);  // only now does 1 let 2 read
      comm.wait(*stuck, 30);
    } else if (comm.identity().rank == 1) {
      comm.wait(*comm.receive(data(small), small.size(), 0, 30), 30);
      comm.wait(*comm.receive(data(small), 1, 0, 30), 30);
      comm.wait(*comm.send(data(small), 1, 2, 30), 30);
    } else {
      comm.wait(*comm.receive(data(small), 1, 1, 30), 30);
      comm.wait(*comm.receive(data(big), big.size(), 0, 30), 30);
    }
  });
}

TEST_P(PointToPointTest, AnySourceTakesWhoeverSends) {
  Ranks ranks(4, GetParam());
  ranks.run([](Communicator& comm) {
    const Rank me = comm.identity().rank;
    if (me != 0) {
      Bytes mine = message(1000, me);
      return comm.wait(*comm.send(data(mine), mine.size(), 0, 30), 30);
    }
    std::vector<bool> seen(4, false);
    for (int i = 0; i < 3; ++i) {
      Bytes got(1000);
      const auto work = comm.receive(data(got), got.size(), Transfer::kAnyRank, 30);
      comm.wait(*work, 30);
      EXPECT_EQ(got, message(1000, work->source()));
      EXPECT_FALSE(seen[static_cast<std::size_t>(work->source())]);
      seen[static_cast<std::size_t>(work->source())] = true;
    }
  });
}

TEST_P(PointToPointTest, TransfersAndCollectivesDoNotWaitForEachOther) {
  Ranks ranks(2, GetParam());
  ranks.run([](Communicator& comm) {
    const Rank me = comm.identity().rank;
    Bytes mine = message(500000, me), got(500000);
    std::vector<float> x(100000, 1);
    const Array arrays[] = {array_of(x)};
    Request sum;
    sum.inputs = sum.outputs = arrays;
    std::shared_ptr<Work> received;
    if (me == 0) received = comm.receive(data(got), got.size(), 1, 30);
    comm.run(sum);
    if (me == 1) received = comm.receive(data(got), got.size(), 0, 30);
    const auto sent = comm.send(data(mine), mine.size(), 1 - me, 30);
    comm.wait(*received, 30);
    comm.wait(*sent, 30);
    EXPECT_EQ(got, message(500000, 1 - me));
    EXPECT_EQ(x[99999], 2);
  });
}

TEST_P(PointToPointTest, AMessageOfAnotherSizeIsInvalid) {
  Ranks ranks(2, GetParam());
  const auto errors = ranks.outcomes([](Communicator& comm) {
    Bytes bytes(100);
    if (comm.identity().rank == 0)
      comm.wait(*comm.receive(data(bytes), 100, 1, 30), 30);
    else
      comm.wait(*comm.send(data(bytes), 99, 0, 30), 30);
  });
  EXPECT_THROW(std::rethrow_exception(errors[0]), InvalidArgument);
}

TEST_P(PointToPointTest, AMessageThatNeverComesIsATimeout) {
  Ranks ranks(2, GetParam());
  Bytes bytes(100);
  const auto work = ranks[0].receive(data(bytes), 100, 1, 0.1);
  try {
    ranks[0].wait(*work, 30);
    FAIL();
  } catch (const Timeout& error) {
    EXPECT_EQ(error.peer(), 1);
  }
}

TEST_P(PointToPointTest, AMessageToOneselfIsCopiedAtOnce) {
  Ranks ranks(2, GetParam());
  ranks.run([](Communicator& comm) {
    const Rank me = comm.identity().rank;
    Bytes sent = message(3000000, me), got(sent.size());
    comm.wait(*comm.send(data(sent), sent.size(), me, 30), 30);
    std::fill(sent.begin(), sent.end(), 0);
    comm.wait(*comm.receive(data(got), got.size(), me, 30), 30);
    EXPECT_EQ(got, message(got.size(), me));
  });
}

TEST(PointToPointPeers, AreChecked) {
  Ranks ranks(2);
  EXPECT_THROW(ranks[0].send(nullptr, 0, -1, 1), InvalidArgument);
  EXPECT_THROW(ranks[0].send(nullptr, 0, 2, 1), InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Transports, PointToPointTest, testing::Values("inproc", "shm", "tcp"));

}  // namespace exec_point_to_point_test
}  // namespace gradwire::exec
