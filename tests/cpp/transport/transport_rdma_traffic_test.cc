// What is asked of a device: how queue pairs are configured, what is registered, how many writes
// and completions the messages cost.
#include "own_time.h"
#include "rdma_fake.h"

namespace gradwire::transport {
namespace transport_rdma_traffic_test {

class RdmaTraffic : public FakeRdma {
 protected:
  RdmaTraffic() { devices_made = devices(); }

  // The writes and the completions asked for by `act`.
  struct Cost {
    int writes = 0;
    int by_value = 0;
    int completions = 0;
  };
  template <typename Act>
  Cost cost_of(Act act) {
    const Cost before = spent();
    act();
    const Cost after = spent();
    return {after.writes - before.writes, after.by_value - before.by_value,
            after.completions - before.completions};
  }
  // One message at a time, so that none waits for another.
  static void ping(Transport& from, Transport& to, int count, std::size_t bytes) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      send(from, {1}, bytes, i);
      expect_message(to, 0, bytes, i);
    }
  }
  Couple plain() const { return couple(of_rank(0, usual()), of_rank(1, usual())); }
  LinkOptions usual() const {
    LinkOptions all = options();
    all.context = devices_made;
    return all;
  }

  std::shared_ptr<RdmaDevices> devices_made;

 private:
  Cost spent() const {
    return {fake.calls("post_send"), fake.calls("post_send inline"),
            fake.calls("post_send signaled")};
  }
};

constexpr int kMessages = 1000;
constexpr int kSlots = 8;  // of a ring between two ranks
constexpr int kInline = 220;

// What both ends tell of their ports and rings goes over sockets, which may be sealed.
TEST_F(RdmaTraffic, LinksAreMadeOverSealedSockets) {
  links_are_sealed = true;
  const Transports ranks = mesh(2);
  links_are_sealed = false;
  ping(*ranks[0], *ranks[1], 3, 1000);
}

TEST_F(RdmaTraffic, TheReaderAnswersOncePerHalfARing) {
  const Couple pair = plain();
  const Cost cost = cost_of([&] { ping(*pair.ends[0], *pair.ends[1], kMessages, 1000); });
  const int words = cost.writes - kMessages;
  EXPECT_NEAR(words, kMessages / (kSlots / 2), 1);
}

// What an end has read goes with what it sends.
TEST_F(RdmaTraffic, RanksThatTalkInTurnsNeedNoWordsAlone) {
  const Couple pair = plain();
  const Cost cost = cost_of([&] {
    for (std::size_t i = 0; i < kMessages; ++i) {
      send(*pair.ends[0], {1}, 8, i);
      expect_message(*pair.ends[1], 0, 8, i);
      send(*pair.ends[1], {0}, 8, i);
      expect_message(*pair.ends[0], 1, 8, i);
    }
  });
  EXPECT_EQ(cost.writes, 2 * kMessages);
}

TEST_F(RdmaTraffic, FewBytesGoByValueAndAskForACompletionNowAndThen) {
  const Couple pair = plain();
  for (std::size_t bytes : {1, 8, kInline}) {
    const Cost cost = cost_of([&] { ping(*pair.ends[0], *pair.ends[1], kMessages, bytes); });
    EXPECT_EQ(cost.by_value, kMessages);
    EXPECT_NEAR(cost.completions, cost.writes / 16, 2);  // each end's words among them
  }
}

TEST_F(RdmaTraffic, ManyBytesAskForACompletionEach) {
  const Couple pair = plain();
  for (std::size_t bytes : {kInline + 1, 64 * 1024}) {
    const Cost cost = cost_of([&] { ping(*pair.ends[0], *pair.ends[1], kMessages, bytes); });
    EXPECT_EQ(cost.by_value, 0);
    const int words = cost.writes - kMessages;
    EXPECT_NEAR(cost.completions, kMessages + words / 16, 1);
  }
}

// A message that is sent by value needs no staging once the device has it: all of a ring leaves one
// cell, though no completion comes.
TEST_F(RdmaTraffic, WhatGoesByValueFreesItsCellAtOnce) {
  LinkOptions one_cell = usual();
  one_cell.messages = 1;
  const Couple pair = couple(of_rank(0, one_cell), of_rank(1, one_cell));
  const std::array peers{1};
  const Cost cost = cost_of([&] {
    for (std::size_t i = 0; i < kSlots; ++i) ASSERT_TRUE(try_send(*pair.ends[0], peers, 8, i));
  });
  EXPECT_EQ(cost.completions, 0);
  for (std::size_t i = 0; i < kSlots; ++i) expect_message(*pair.ends[1], 0, 8, i);
}

// What the peer told meanwhile is heard: a sender that only ever sends needs no flush.
TEST_F(RdmaTraffic, CommitSendsWhatTheReaderHasRoomFor) {
  const Couple pair = plain();
  const std::array peers{1};
  for (std::size_t i = 0; i < 10 * kSlots; ++i) {
    ASSERT_TRUE(try_send(*pair.ends[0], peers, 8, i));
    expect_message(*pair.ends[1], 0, 8, i);
  }
}

TEST_F(RdmaTraffic, AnEndWaitsForWhatWasSentOnly) {
  LinkOptions many = usual();
  many.messages = 16;
  Couple pair = couple(of_rank(0, many), of_rank(1, many));
  const std::array peers{1};
  for (std::size_t i = 0; i < kSlots + 4; ++i) ASSERT_TRUE(try_send(*pair.ends[0], peers, 8, i));
  EXPECT_FALSE(pair.ends[0]->is_flushed(1));
  for (std::size_t i = 0; i < kSlots; ++i) expect_message(*pair.ends[1], 0, 8, i);
  const OwnTime watch;
  pair.ends[0].reset();  // it has yet to hear that there is room
  EXPECT_LT(watch.seconds(), 0.5);
}

// What the device takes by value, and what is then sent so.
TEST_F(RdmaTraffic, ADeviceThatTakesLessByValueIsAskedForLess) {
  const std::vector<std::pair<unsigned, std::size_t>> takes = {
      {256, 220}, {220, 220}, {219, 128}, {128, 128}, {100, 64}, {63, 0}, {0, 0}};
  for (const auto& [most, used] : takes) {
    fake.hardware()->most_inline = most;
    const Couple pair = plain();
    ASSERT_TRUE(pair.ends[0] && pair.ends[1]) << pair.errors[0] << pair.errors[1];
    const Cost cost = cost_of([&] {
      ping(*pair.ends[0], *pair.ends[1], 1, used);
      ping(*pair.ends[0], *pair.ends[1], 1, used + 1);
    });
    EXPECT_EQ(cost.by_value, used > 0 ? 1 : 0) << most;
  }
}

TEST_F(RdmaTraffic, MemoryIsRegisteredOnceForEachTransportAndPort) {
  fake.hardware()->ports = 4;
  LinkOptions all = usual();
  all.context = devices();
  const int before = fake.calls("ibv_reg_mr");
  const Transports mesh = connect("rdma", 5, all);
  const int registered = fake.calls("ibv_reg_mr") - before;
  EXPECT_EQ(fake.calls("ibv_create_qp"), 5 * 4);
  EXPECT_EQ(registered, fake.calls("ibv_create_cq"));  // one of each for a port in use
  EXPECT_GT(registered, 5);                            // more than one a rank are
  EXPECT_LT(registered, 5 * 4);                        // and yet links share them
  for (std::size_t i = 0; i < 100; ++i) {
    send(*mesh[0], {1, 2, 3, 4}, 1000 + i, i);
    for (std::size_t rank = 1; rank < 5; ++rank) expect_message(*mesh[rank], 0, 1000 + i, i);
  }
  EXPECT_EQ(fake.calls("ibv_reg_mr") - before, registered);
}

// A ring of two slots, and as many ranks as make it so.
TEST_F(RdmaTraffic, TheSmallestRingServes) {
  LinkOptions large = usual();
  large.size = 18;
  large.max_message = 1 << 20;
  const Couple pair = couple(of_rank(0, large), of_rank(1, large));
  ASSERT_TRUE(pair.ends[0] && pair.ends[1]) << pair.errors[0] << pair.errors[1];
  const Cost cost = cost_of([&] { ping(*pair.ends[0], *pair.ends[1], 100, 300); });
  EXPECT_NEAR(cost.writes, 200, 1);  // each message is answered
}

TEST_F(RdmaTraffic, AMessageTooLargeForThePortIsRefused) {
  fake.hardware()->max_message = 64 * 1024 - 1;
  LinkOptions narrow = usual();
  narrow.context = devices();
  const Couple pair = couple(of_rank(0, narrow), of_rank(1, narrow));
  for (const std::string& error : pair.errors) EXPECT_FALSE(error.empty());
  expect_words(pair.errors[0], {"65536 bytes", "too large for fake0:1"});
}

TEST_F(RdmaTraffic, AMessageWhoseLengthNoWordHoldsIsRefused) {
  fake.hardware()->max_message = 1U << 31;
  LinkOptions wide = usual();
  wide.context = devices();
  wide.max_message = 1 << 27;
  wide.messages = 1;
  const Couple pair = couple(of_rank(0, wide), of_rank(1, wide));
  expect_words(pair.errors[0], {"134217728 bytes", "too large"});
}

// --- how queue pairs are configured ---

TEST_F(RdmaTraffic, TheSmallerMtuOfTheTwoEndsIsUsed) {
  LinkOptions small = usual();
  small.context = devices({.mtu = 1024});
  for (const auto& [lower, higher] : {std::pair{small, usual()}, std::pair{usual(), small}}) {
    fake.reset();
    const Couple pair = couple(of_rank(0, lower), of_rank(1, higher));
    ASSERT_TRUE(pair.ends[0] && pair.ends[1]) << pair.errors[0] << pair.errors[1];
    EXPECT_EQ(fake.calls("ibv_modify_qp 2"), 2);
    EXPECT_EQ(fake.modified(ibv::kQpReadyToReceive).path_mtu, ibv::kMtu1024);
  }
}

TEST_F(RdmaTraffic, TheSettingsReachTheQueuePair) {
  LinkOptions all = usual();
  all.context = devices({.gid_index = 1, .traffic_class = 106, .service_level = 3, .timeout = 22});
  const Couple pair = couple(of_rank(0, all), of_rank(1, all));
  const ibv::QpAttr receive = fake.modified(ibv::kQpReadyToReceive);
  EXPECT_EQ(receive.ah_attr.is_global, 1);
  EXPECT_EQ(receive.ah_attr.grh.sgid_index, 1);
  EXPECT_EQ(receive.ah_attr.grh.dgid,
            std::dynamic_pointer_cast<RdmaDevices>(all.context)->ports()[0].address.gid);
  EXPECT_EQ(receive.ah_attr.grh.traffic_class, 106);
  EXPECT_EQ(receive.ah_attr.sl, 3);
  EXPECT_EQ(receive.ah_attr.port_num, 1);
  EXPECT_EQ(fake.modified(ibv::kQpReadyToSend).timeout, 22);
}

TEST_F(RdmaTraffic, InfiniBandIsAddressedByLid) {
  fake.hardware()->link_layer = ibv::kLinkInfiniBand;
  LinkOptions all = usual();
  all.context = devices();
  const Couple pair = couple(of_rank(0, all), of_rank(1, all));
  const ibv::AhAttr to = fake.modified(ibv::kQpReadyToReceive).ah_attr;
  EXPECT_EQ(to.is_global, 0);
  EXPECT_EQ(to.dlid, 7);
}

// --- several ports ---

TEST_F(RdmaTraffic, EndsWithDifferentNumbersOfPortsMeet) {
  fake.hardware()->ports = 3;
  LinkOptions many = usual();
  many.context = devices();
  const Couple pair = couple(of_rank(0, many), of_rank(1, usual()));
  ASSERT_TRUE(pair.ends[0] && pair.ends[1]) << pair.errors[0] << pair.errors[1];
  ping(*pair.ends[0], *pair.ends[1], 10, 1000);
}

}  // namespace transport_rdma_traffic_test
}  // namespace gradwire::transport
