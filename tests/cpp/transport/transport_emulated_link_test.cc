// The clocks of an emulated link. Nothing here waits.
#include "gradwire/transport/emulated_link.h"

#include <gtest/gtest.h>

#include <array>

#include "gradwire/base/error.h"
#include "transport_harness.h"

namespace gradwire::transport {
namespace transport_emulated_link_test {

using Flight = EmulatedLink::Flight;
using std::chrono::duration;

// So slow that a link is still busy when this thread, which others may have interrupted, is back.
constexpr const char* kLink = "100kbit";
constexpr std::size_t kPacket = 1448;              // bytes of payload
constexpr double kPacketSeconds = 1514 * 8 / 1e5;  // over kLink

double seconds(EmulatedLink::Time from, EmulatedLink::Time to) {
  return duration<double>(to - from).count();
}

TEST(EmulatedLink, RefusesWhatIsNoLinkAndSaysWhatIs) {
  for (const char* wrong :
       {"1gib", "", "1", "gbit", "1gbit,", "1gbit,5", "1gbit,5us,5us", "1 gbit", "-1gbit", "0mbit",
        "inf gbit", "infgbit", "nanmbit", "1gbit,-1us", "1gbit,nanus", "99kbit", "1gbit,2s"}) {
    try {
      const EmulatedLink link(wrong);
      ADD_FAILURE() << "took '" << wrong << "'";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("1gbit,100us"), std::string::npos) << error.what();
    }
  }
  for (const char* right : {"1gbit", "2.5gbit,0.5ms", "100mbit,0us", "100kbit,1s"})
    EXPECT_NO_THROW(EmulatedLink{right}) << right;
}

TEST(EmulatedLink, AllThatIsSentSharesTheRate) {
  EmulatedLink link(kLink);
  const Flight first = link.send(100 * kPacket, 1);
  const Flight second = link.send(50 * kPacket, 1);
  EXPECT_NEAR(seconds(first.first, first.last), 100 * kPacketSeconds, 1e-6);
  EXPECT_NEAR(seconds(first.last, second.first), 0, 1e-9);
  EXPECT_NEAR(seconds(first.first, second.last), 150 * kPacketSeconds, 1e-6);
}

TEST(EmulatedLink, CopiesShareTheRate) {
  EmulatedLink link(kLink);
  const Flight flight = link.send(100 * kPacket, 3);
  EXPECT_NEAR(seconds(flight.first, flight.last), 300 * kPacketSeconds, 1e-6);
}

TEST(EmulatedLink, ALatencyDelaysAndCostsNoRate) {
  EmulatedLink far("100kbit,5ms");
  const auto before = Deadline::Clock::now();
  const Flight flight = far.send(100 * kPacket, 1);
  EXPECT_GE(seconds(before, flight.first), 5e-3);
  EXPECT_NEAR(seconds(flight.first, flight.last), 100 * kPacketSeconds, 1e-6);
  EXPECT_NEAR(seconds(flight.last, far.send(kPacket, 1).first), 0, 1e-9);
}

TEST(EmulatedLink, AnIdleLinkSendsAtOnce) {
  EmulatedLink link("1000gbit");
  link.send(1, 1);
  const auto later = Deadline::Clock::now() + std::chrono::microseconds(10);
  while (Deadline::Clock::now() < later) continue;
  EXPECT_GE(link.send(1, 1).first, later);
}

// Two senders at full rate: a receiver's NIC has one rate.
TEST(EmulatedLink, AllThatIsReceivedSharesTheRate) {
  EmulatedLink one(kLink), other(kLink), receiver(kLink);
  const Flight a = one.send(100 * kPacket, 1);
  const Flight b = other.send(100 * kPacket, 1);
  EXPECT_NEAR(seconds(a.last, receiver.receive(a, 100 * kPacket)), 0, 1e-6);
  EXPECT_NEAR(seconds(a.first, receiver.receive(b, 100 * kPacket)), 200 * kPacketSeconds, 1e-6);
}

TEST(EmulatedLink, AFastReceiverWaitsForTheSender) {
  EmulatedLink sender(kLink), receiver("1mbit");
  const Flight flight = sender.send(100 * kPacket, 1);
  EXPECT_EQ(receiver.receive(flight, 100 * kPacket), flight.last);
}

TEST(EmulatedTransport, NeedsALink) {
  EXPECT_THROW(make_transport("emulated", LinkOptions{.rank = 0, .size = 2}), InvalidArgument);
}

}  // namespace transport_emulated_link_test
}  // namespace gradwire::transport
