// What all tcp links of a process share. Nothing here waits but for the end of a share.
#include "gradwire/transport/tcp_traffic.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "gradwire/base/error.h"
#include "transport_harness.h"

namespace gradwire::transport {
namespace transport_tcp_traffic_test {

TEST(RateOfDay, RefusesWhatIsNoRateAndSaysWhatIs) {
  for (const char* wrong :
       {"", "1", "1gbit,", "1gbit,2gbit", "=1gbit", "-=1gbit", "08:00=1gbit", "8:00-18:00=1gbit",
        "08:60-18:00=1gbit", "08:00-24:01=1gbit", "0800-18:00=1gbit", "08:00-18:00=", "1kbit",
        "-8:00-18:00=1gbit", "08.00-18:00=1gbit"}) {
    try {
      const RateOfDay rate(wrong);
      ADD_FAILURE() << "took '" << wrong << "'";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("200mbit,08:00"), std::string::npos) << error.what();
    }
  }
}

TEST(RateOfDay, ATimesRateGoesBeforeTheUsualOne) {
  const RateOfDay rate("200mbit,08:00-18:00=50mbit,22:30-06:00=1gbit,00:00-24:00=3mbit");
  EXPECT_EQ(rate.at_minute(8 * 60 - 1), 3e6);
  EXPECT_EQ(rate.at_minute(8 * 60), 50e6);
  EXPECT_EQ(rate.at_minute(18 * 60 - 1), 50e6);
  EXPECT_EQ(rate.at_minute(18 * 60), 3e6);
  EXPECT_EQ(rate.at_minute(22 * 60 + 30), 1e9);
  EXPECT_EQ(rate.at_minute(0), 1e9);
  EXPECT_EQ(rate.at_minute(6 * 60), 3e6);
}

TEST(RateOfDay, AllOtherTimesHaveTheUsualRateOrNoLimit) {
  EXPECT_EQ(RateOfDay("200mbit,08:00-18:00=50mbit").at_minute(0), 200e6);
  EXPECT_EQ(RateOfDay("08:00-18:00=50mbit").at_minute(0), RateOfDay::kNoLimit);
  EXPECT_EQ(RateOfDay("200mbit").now(), 200e6);
  EXPECT_EQ(RateOfDay("00:00-24:00=50mbit").now(), 50e6);
  EXPECT_TRUE(RateOfDay("00:00-24:00=50mbit").limits());
  EXPECT_FALSE(RateOfDay().limits());
}

void fill_up(const UniqueFd& socket) {
  const std::vector<char> bytes(1 << 16);
  while (::send(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) continue;
}

double rate_of(const UniqueFd& socket) {
  unsigned long bytes = 0;
  socklen_t size = sizeof bytes;
  EXPECT_EQ(::getsockopt(socket.get(), SOL_SOCKET, SO_MAX_PACING_RATE, &bytes, &size), 0);
  return 8 * static_cast<double>(bytes);
}

TEST(TcpTraffic, SocketsThatSendShareTheRateAndOthersTakeNone) {
  TcpTraffic traffic(Settings{{"GRADWIRE_RATE", "800mbit"}});
  Ends one = tcp_ends(), other = tcp_ends(), idle = tcp_ends();
  for (const Ends* each : {&one, &other, &idle}) traffic.add(each->first.get());
  traffic.share(one.first.get());
  EXPECT_EQ(rate_of(one.first), 800e6);
  fill_up(one.first);
  traffic.share(other.first.get());
  EXPECT_EQ(rate_of(one.first), 400e6);
  EXPECT_EQ(rate_of(other.first), 400e6);
  traffic.remove(one.first.get());
  one.first.reset();
  const auto deadline = Deadline::after(kTestSeconds);
  while (rate_of(other.first) != 800e6 && !deadline.passed()) traffic.share(other.first.get());
  EXPECT_EQ(rate_of(other.first), 800e6);
}

TEST(TcpTraffic, WithoutARateSocketsKeepTheirs) {
  TcpTraffic traffic(Settings{});
  const Ends ends = tcp_ends();
  const double before = rate_of(ends.first);
  traffic.add(ends.first.get());
  traffic.share(ends.first.get());
  EXPECT_EQ(rate_of(ends.first), before);
  EXPECT_TRUE(traffic.describe().empty());
}

TEST(TcpTraffic, SocketsGetTheirClassAndCongestionControl) {
  TcpTraffic traffic(
      Settings{{"GRADWIRE_TRAFFIC_CLASS", "32"}, {"GRADWIRE_TCP_CONGESTION", "reno"}});
  const Ends ends = tcp_ends();
  traffic.add(ends.first.get());
  int found = 0;
  socklen_t size = sizeof found;
  ASSERT_EQ(::getsockopt(ends.first.get(), IPPROTO_IP, IP_TOS, &found, &size), 0);
  EXPECT_EQ(found, 32);
  char name[16] = {};
  size = sizeof name;
  ASSERT_EQ(::getsockopt(ends.first.get(), IPPROTO_TCP, TCP_CONGESTION, name, &size), 0);
  EXPECT_STREQ(name, "reno");
  EXPECT_EQ(traffic.describe(),
            (std::vector<std::string>{"congestion control reno", "traffic class 32"}));
}

TEST(TcpTraffic, WhatTheKernelRefusesIsSaid) {
  TcpTraffic traffic(Settings{{"GRADWIRE_TCP_CONGESTION", "none such"}});
  const Ends ends = tcp_ends();
  EXPECT_THROW(traffic.add(ends.first.get()), InvalidArgument);
  EXPECT_THROW(TcpTraffic(Settings{{"GRADWIRE_TRAFFIC_CLASS", "256"}}), InvalidArgument);
  EXPECT_THROW(TcpTraffic(Settings{{"GRADWIRE_RATE", "fast"}}), InvalidArgument);
  const Ends local = unix_ends();
  EXPECT_NO_THROW(traffic.add(local.first.get()));
}

}  // namespace transport_tcp_traffic_test
}  // namespace gradwire::transport
