// What happens where a verb fails, a write ends badly, or a peer says what can't be.
#include "rdma_fake.h"

namespace gradwire::transport {
namespace transport_rdma_faults_test {

// Bits of a word: there is no message; so many messages were read, modulo 16.
constexpr unsigned kNoMessage = 1U << 31;
constexpr unsigned read(unsigned count) { return count % 16 << 27; }
constexpr std::size_t kSlots = 8;     // of a ring between two or three ranks
constexpr std::size_t kLarge = 1000;  // not by value

class RdmaFaults : public FakeRdma {
 protected:
  // No failure any more.
  void mend(const char* verb) const { fake.fail(verb, 0, 0); }

  static void expect_traffic(Transport& from, Transport& to) {
    for (std::size_t bytes : {std::size_t{8}, kLarge}) {
      send(from, {to_rank}, bytes, bytes);
      expect_message(to, from_rank, bytes, bytes);
    }
  }
  static constexpr Rank from_rank = 0, to_rank = 1;

  // A link with which nothing is wrong: whatever failed before, the process goes on.
  static void expect_a_new_link_works() {
    const Transports fresh = mesh(2);
    expect_traffic(*fresh[0], *fresh[1]);
  }

  // As many messages as the ring and the staging hold, and no fewer, until they are read.
  static void expect_all_staging_is_free(Transport& from, Transport& to) {
    const std::array peers{2};
    std::size_t sent = 0;
    while (sent < 100 && try_send(from, peers, kLarge, sent)) ++sent;
    EXPECT_EQ(sent, kSlots + static_cast<std::size_t>(options().messages));
    for (std::size_t i = 0; i < sent; ++i) {
      from.flush();
      expect_message(to, 0, kLarge, i);
    }
  }

  // All that a rank may try with a peer that is gone.
  static void expect_gone(Transport& self, Rank peer) {
    const std::array peers{peer};
    const auto named = [&](auto call) {
      expect_words(thrown_by<TransportError>(call), {"link to rank " + std::to_string(peer)});
    };
    named([&] { self.peek(peer); });
    named([&] { self.reserve(peers, 8); });
    self.arm();
    self.disarm();
    self.flush();
  }
  // ... and nothing of it may reach the device.
  void expect_gone_for_good(Transport& self, Rank peer) const {
    const int posted = fake.calls("post_send"), received = fake.calls("post_recv");
    for (int i = 0; i < 3; ++i) expect_gone(self, peer);
    EXPECT_EQ(fake.calls("post_send"), posted);
    EXPECT_EQ(fake.calls("post_recv"), received);
  }
};

// --- while a link is made ---

struct Making {
  const char* verb;
  std::string named;  // in the error of the end that it fails for
  int calls;          // by the two ends: each of them fails in turn, and all that follow
};

class RdmaMaking : public RdmaFaults, public testing::WithParamInterface<Making> {};

TEST_P(RdmaMaking, AVerbThatFailsEndsBothEnds) {
  const auto& [verb, named, calls] = GetParam();
  const LinkOptions lower = of_rank(0, options()), higher = of_rank(1, options());
  const int before = fake.alive();
  for (int after = 0; after < calls; ++after) {
    SCOPED_TRACE(after);
    fake.fail(verb, EIO, after);
    {
      Couple pair = couple(lower, higher);
      EXPECT_FALSE(pair.ends[0] && pair.ends[1]);
      bool told = false;
      for (std::size_t i = 0; i < 2; ++i) {
        const std::string& error = pair.errors[i];
        const bool own = error.find(named) != std::string::npos;
        const std::string peer = "link to rank " + std::to_string(1 - i);
        told = told || own;
        EXPECT_EQ(pair.ends[i] == nullptr, !error.empty());
        EXPECT_TRUE(error.empty() || own || error.find(peer) != std::string::npos) << error;
      }
      EXPECT_TRUE(told) << pair.errors[0] << "\n" << pair.errors[1];
      mend(verb);
      for (std::size_t i = 0; i < 2; ++i)  // an end that was ready before hears of it
        if (pair.ends[i]) expect_end(*pair.ends[i], static_cast<Rank>(1 - i));
    }
    EXPECT_EQ(fake.alive(), before);
  }
  EXPECT_GE(fake.calls(verb), calls);
  expect_a_new_link_works();
}

const std::string kFailure = "Input/output error";

INSTANTIATE_TEST_SUITE_P(
    Verbs, RdmaMaking,
    testing::Values(Making{"ibv_reg_mr", "ibv_reg_mr of 2 MiB (raise the memory-lock limit", 2},
                    Making{"ibv_create_comp_channel", "ibv_create_comp_channel: " + kFailure, 2},
                    Making{"ibv_create_cq", "ibv_create_cq for 152 completions: " + kFailure, 2},
                    Making{"ibv_create_qp", "ibv_create_qp: " + kFailure, 2},
                    Making{"ibv_modify_qp 1", "ibv_modify_qp to INIT: " + kFailure, 2},
                    Making{"ibv_modify_qp 2", "ibv_modify_qp to RTR: " + kFailure, 2},
                    Making{"ibv_modify_qp 3", "ibv_modify_qp to RTS: " + kFailure, 2},
                    Making{"post_recv", "ibv_post_recv: " + kFailure, 2 * (8 + 4)},
                    Making{"post_send", "the device refused a write: " + kFailure, 2},
                    Making{"poll_cq", "ibv_poll_cq: " + kFailure, 2}),
    [](const auto& its) {
      std::string name = its.param.verb;
      std::ranges::replace(name, ' ', '_');
      return name;
    });

TEST_F(RdmaFaults, AQueuePairIsTriedWithLessByValueBeforeItIsGivenUp) {
  const LinkOptions lower = of_rank(0, options()), higher = of_rank(1, options());
  fake.fail("ibv_create_qp", EINVAL, 0);
  const Couple pair = couple(lower, higher);
  expect_words(pair.errors[0], {"fake0: ibv_create_qp: Invalid argument"});
  EXPECT_EQ(fake.calls("ibv_create_qp"), 4);  // the other end waits for this one
}

TEST_F(RdmaFaults, TooLittleLockableMemoryIsToldWithTheRemedy) {
  const LinkOptions lower = of_rank(0, options()), higher = of_rank(1, options());
  fake.fail("ibv_reg_mr", ENOMEM, 0);
  const Couple pair = couple(lower, higher);
  expect_words(pair.errors[0],
               {"Cannot allocate memory", "ulimit -l unlimited", "GRADWIRE_TRANSPORT=shm,tcp"});
}

// --- while a link is used ---

TEST_F(RdmaFaults, AWriteThatTheDeviceRefusesEndsThisLinkOnly) {
  const std::array peers{1};
  for (std::size_t bytes : {std::size_t{8}, kLarge}) {
    const Transports ranks = mesh(3);
    ranks[0]->reserve(peers, bytes);
    fake.fail("post_send", ENOMEM, 0);
    expect_words(thrown_by<TransportError>([&] { ranks[0]->commit(bytes); }),
                 {"link to rank 1", "refused a write", "Cannot allocate memory"});
    mend("post_send");
    expect_gone_for_good(*ranks[0], 1);
    expect_end(*ranks[1], 0);
    for (Rank rank : {0, 1}) {
      send(*ranks[2], {rank}, bytes, 1);
      expect_message(*ranks[static_cast<std::size_t>(rank)], 2, bytes, 1);
    }
  }
}

// Writes are over, and messages have come, of which the sender has yet to hear.
TEST_F(RdmaFaults, WhatWasOverBeforeARefusedWriteIsHeardAfterIt) {
  const Transports ranks = mesh(3);
  const std::array peers{1};
  for (std::size_t i = 0; i < kSlots; ++i) send(*ranks[1], {0}, 8, i);
  for (std::size_t i = 0; i < 3; ++i) ASSERT_TRUE(try_send(*ranks[0], peers, kLarge, i));
  ranks[0]->reserve(peers, 8);
  fake.fail("post_send", ENOMEM, 0);
  EXPECT_THROW(ranks[0]->commit(8), TransportError);
  mend("post_send");
  const int posted = fake.calls("post_send"), received = fake.calls("post_recv");
  for (std::size_t i = 0; i < kSlots; ++i) expect_message(*ranks[0], 1, 8, i);
  EXPECT_EQ(fake.calls("post_send"), posted);
  EXPECT_EQ(fake.calls("post_recv"), received);
  expect_gone_for_good(*ranks[0], 1);
  expect_all_staging_is_free(*ranks[0], *ranks[2]);
}

TEST_F(RdmaFaults, AReaderThatCanNotAnswerHasReadWhatCame) {
  const Transports ranks = mesh(2);
  for (std::size_t i = 0; i < kSlots; ++i) send(*ranks[0], {1}, 8, i);
  for (std::size_t i = 0; i < kSlots / 2 - 1; ++i) expect_message(*ranks[1], 0, 8, i);
  fake.fail("post_send", EIO, 0);
  for (std::size_t i = kSlots / 2 - 1; i < kSlots; ++i) expect_message(*ranks[1], 0, 8, i);
  mend("post_send");
  expect_gone_for_good(*ranks[1], 0);
  expect_end(*ranks[0], 1);
}

TEST_F(RdmaFaults, ADeviceThatReceivesNoMoreEndsTheLinkAfterWhatCame) {
  const Transports ranks = mesh(2);
  for (std::size_t i = 0; i < 3; ++i) send(*ranks[0], {1}, 8, i);
  fake.fail("post_recv", ENOMEM, 0);
  for (std::size_t i = 0; i < 3; ++i) expect_message(*ranks[1], 0, 8, i);
  expect_words(thrown_by<TransportError>([&] { ranks[1]->peek(0); }),
               {"link to rank 0", "refused to receive", "Cannot allocate memory"});
  expect_gone_for_good(*ranks[1], 0);
  expect_end(*ranks[0], 1);
}

TEST_F(RdmaFaults, ADeviceThatFailsNamesTheVerb) {
  const Transports ranks = mesh(2);
  fake.fail("poll_cq", EIO, 0);
  expect_words(thrown_by<Error>([&] { ranks[0]->peek(1); }),
               {"fake0:1", "ibv_poll_cq: Input/output error"});
  mend("poll_cq");
  fake.fail("req_notify_cq", EIO, 0);
  expect_words(thrown_by<Error>([&] { ranks[0]->arm(); }),
               {"fake0:1", "ibv_req_notify_cq: Input/output error"});
  mend("req_notify_cq");
  expect_traffic(*ranks[0], *ranks[1]);  // for these are not for good
}

// ... in whatever state the ends are, and with messages under way.
TEST_F(RdmaFaults, ADeviceThatFailsForGoodHoldsUpNoEnd) {
  for (const char* verb :
       {"poll_cq", "req_notify_cq", "post_send", "post_recv", "ibv_modify_qp 6"}) {
    SCOPED_TRACE(verb);
    {
      const Transports ranks = mesh(3);
      for (std::size_t i = 0; i < 5; ++i) {
        send(*ranks[0], {1, 2}, 8, i);
        send(*ranks[1], {2}, 8, i);
      }
      fake.fail(verb, EIO, 0);
    }
    EXPECT_EQ(fake.alive(), 0);
    mend(verb);
  }
  expect_a_new_link_works();
}

// --- writes that end badly ---

struct Ending {
  int status;
  std::string told;
};

class RdmaEnding : public RdmaFaults, public testing::WithParamInterface<Ending> {
 protected:
  // A write of rank 0 to rank 1 ends badly; rank 0 has yet to hear of it.
  void break_a_write(Transport& self, std::size_t bytes) const {
    fake.break_next(GetParam().status);
    const std::array peers{1};
    ASSERT_TRUE(try_send(self, peers, bytes, 0));
  }
};

TEST_P(RdmaEnding, NamesThePeerAfterWhatItSent) {
  for (std::size_t bytes : {std::size_t{8}, kLarge}) {
    const Transports ranks = mesh(2);
    for (std::size_t i = 0; i < kSlots; ++i) send(*ranks[1], {0}, bytes, i);
    break_a_write(*ranks[0], bytes);
    const int posted = fake.calls("post_send");
    for (std::size_t i = 0; i < kSlots; ++i) expect_message(*ranks[0], 1, bytes, i);
    EXPECT_EQ(fake.calls("post_send"), posted);  // these are answered no more
    expect_words(thrown_by<TransportError>([&] { ranks[0]->peek(1); }),
                 {"rank 0: rdma link to rank 1: the connection broke", GetParam().told});
    expect_gone_for_good(*ranks[0], 1);
    expect_end(*ranks[1], 0);
  }
}

TEST_P(RdmaEnding, LeavesTheOtherPeersAndTheStaging) {
  const Transports ranks = mesh(3);
  const std::array peers{1};
  break_a_write(*ranks[0], kLarge);
  const auto cells = static_cast<std::size_t>(options().messages);
  for (std::size_t i = 1; i < cells; ++i) ASSERT_TRUE(try_send(*ranks[0], peers, kLarge, i));
  EXPECT_FALSE(ranks[0]->peek(2).has_value());  // and hears of it
  expect_all_staging_is_free(*ranks[0], *ranks[2]);
  for (std::size_t i = 0; i < 20; ++i) {
    send(*ranks[2], {0, 1}, kLarge, i);
    expect_message(*ranks[0], 2, kLarge, i);
    expect_message(*ranks[1], 2, kLarge, i);
  }
  expect_gone_for_good(*ranks[0], 1);
  expect_end(*ranks[1], 0);
  EXPECT_EQ(fake.calls("ibv_modify_qp 6"), 2);  // each end broke it off, once
}

TEST_P(RdmaEnding, OfAMessageToSeveralReachesTheOthers) {
  const Transports ranks = mesh(3);
  fake.break_next(GetParam().status);  // the one to rank 1
  send(*ranks[0], {1, 2}, kLarge, 7);
  expect_message(*ranks[2], 0, kLarge, 7);
  EXPECT_FALSE(ranks[0]->peek(2).has_value());
  EXPECT_THROW(ranks[0]->peek(1), TransportError);
}

TEST_P(RdmaEnding, RingsTheBell) {
  const Transports ranks = mesh(2);
  ranks[0]->arm();
  ASSERT_FALSE(ranks[0]->peek(1).has_value());
  break_a_write(*ranks[0], 8);
  EXPECT_TRUE(rings(*ranks[0], 0));
  ranks[0]->disarm();
  EXPECT_THROW(ranks[0]->peek(1), TransportError);
  EXPECT_TRUE(rings(*ranks[1], 30'000));  // its socket
}

TEST_P(RdmaEnding, OfTheWordThatAnswersEndsTheReader) {
  const Transports ranks = mesh(2);
  for (std::size_t i = 0; i < kSlots / 2; ++i) send(*ranks[0], {1}, 8, i);
  for (std::size_t i = 0; i < kSlots / 2 - 1; ++i) expect_message(*ranks[1], 0, 8, i);
  fake.break_next(GetParam().status);
  expect_message(*ranks[1], 0, 8, kSlots / 2 - 1);
  expect_end(*ranks[1], 0);
  expect_end(*ranks[0], 1);
}

TEST_P(RdmaEnding, NothingIsWrittenAtTheEndOfABrokenLink) {
  Transports ranks = mesh(2);
  for (std::size_t i = 0; i < 3; ++i) send(*ranks[0], {1}, 8, i);
  break_a_write(*ranks[0], 8);
  EXPECT_THROW(ranks[0]->peek(1), TransportError);
  const int posted = fake.calls("post_send");
  ranks[0].reset();
  EXPECT_EQ(fake.calls("post_send"), posted);
}

TEST_P(RdmaEnding, WithinAnEndItIsNoMore) {
  Transports ranks = mesh(2);
  send(*ranks[0], {1}, 8, 0);
  fake.break_next(GetParam().status);
  ranks[0].reset();  // whose last write breaks
  expect_message(*ranks[1], 0, 8, 0);
  expect_end(*ranks[1], 0);
}

INSTANTIATE_TEST_SUITE_P(Statuses, RdmaEnding,
                         testing::Values(Ending{1, "some other error"},       // a length
                                         Ending{4, "some other error"},       // local protection
                                         Ending{ibv::kWcFlushed, "Flushed"},  //
                                         Ending{9, "some other error"},   // an invalid request, far
                                         Ending{10, "some other error"},  // remote access
                                         Ending{ibv::kWcRetryExceeded, "its host died"},  //
                                         Ending{ibv::kWcRnrExceeded, "RNR retry counter exceeded"}),
                         [](const auto& its) {
                           return "Status" + std::to_string(its.param.status);
                         });

// --- peers that say what can't be ---

class RdmaWords : public RdmaFaults {
 protected:
  // Both ends are said this word by the other one; nothing had arrived.
  void expect_refused(unsigned word, const std::string& told) const {
    const Transports ranks = mesh(2);
    fake.inject(word);
    for (Rank rank : {0, 1}) {
      Transport& self = *ranks[static_cast<std::size_t>(rank)];
      expect_words(thrown_by<TransportError>([&] { self.peek(1 - rank); }),
                   {"link to rank " + std::to_string(1 - rank), told});
      expect_gone_for_good(self, 1 - rank);
    }
  }
};

TEST_F(RdmaWords, AMessageLongerThanAnyIsRefused) {
  for (unsigned bytes : {64U * 1024 + 1, 1U << 26, (1U << 27) - 1})
    expect_refused(bytes, "impossible message of " + std::to_string(bytes) + " bytes");
}

TEST_F(RdmaWords, MoreReadThanWasSentIsRefused) {
  for (unsigned count : {1U, 8U, 15U}) {
    expect_refused(kNoMessage | read(count), "read more messages than were sent");
    expect_refused(64 | read(count), "read more messages than were sent");
  }
}

TEST_F(RdmaWords, FlushTellsOfItToo) {
  const Transports ranks = mesh(2);
  const std::array peers{1};
  for (std::size_t i = 0; i < kSlots + 2; ++i) ASSERT_TRUE(try_send(*ranks[0], peers, 8, i));
  EXPECT_FALSE(ranks[0]->flush());
  fake.inject(kNoMessage | read(kSlots + 1));
  expect_words(thrown_by<TransportError>([&] { ranks[0]->flush(); }),
               {"link to rank 1", "read more messages than were sent"});
  EXPECT_TRUE(ranks[0]->flush());
}

TEST_F(RdmaWords, FewerReadThanBeforeIsRefused) {
  const Transports ranks = mesh(2);
  for (std::size_t i = 0; i < kSlots; ++i) {
    send(*ranks[0], {1}, 8, i);
    expect_message(*ranks[1], 0, 8, i);
  }
  EXPECT_FALSE(ranks[0]->peek(1).has_value());  // and hears that all were read
  fake.inject(kNoMessage | read(kSlots - 1));
  expect_words(thrown_by<TransportError>([&] { ranks[0]->peek(1); }), {"link to rank 1"});
}

TEST_F(RdmaWords, WhatWasSaidBeforeMayBeSaidAgain) {
  const Transports ranks = mesh(2);
  for (int i = 0; i < 100; ++i) {
    fake.inject(kNoMessage);
    for (Rank rank : {0, 1})
      EXPECT_FALSE(ranks[static_cast<std::size_t>(rank)]->peek(1 - rank).has_value());
  }
  expect_traffic(*ranks[0], *ranks[1]);
}

// A ring is full: the message that comes all the same would lie upon another.
TEST_F(RdmaWords, AMessageOutOfTurnEndsTheLinkAfterThoseInTurn) {
  const Transports ranks = mesh(2);
  for (std::size_t i = 0; i < kSlots + 1; ++i) fake.inject(64);
  for (Rank rank : {0, 1}) {
    Transport& self = *ranks[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < kSlots; ++i) {
      ASSERT_EQ(self.peek(1 - rank)->size(), 64U) << i;
      self.release(1 - rank);
    }
    expect_words(thrown_by<TransportError>([&] { self.peek(1 - rank); }),
                 {"link to rank " + std::to_string(1 - rank), "out of turn"});
    expect_gone_for_good(self, 1 - rank);
  }
}

}  // namespace transport_rdma_faults_test
}  // namespace gradwire::transport
