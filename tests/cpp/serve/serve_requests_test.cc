// Requests that are cut off, that begin anew, and of frames that no client sends.
#include <limits>

#include "serve_requests.h"

namespace gradwire::serve {
namespace serve_requests_test {

TEST(Shard, AppliesNothingOfAPushThatIsCutOff) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table();
  Direct job(table);
  const Arrays x = random_of(table, 1), g = random_of(table, 2);
  job.send(Op::kSet, 1, x);
  job.send(Op::kPush, 1, g, 0, 0, job.shard.layout().frames().size() - 1);
  job.shard.leave(1);
  EXPECT_EQ(job.shard.version(), 0U);
  EXPECT_EQ(job.shard.statistics().partial, 1U);
  EXPECT_TRUE(same_bits(job.shard.values(), range_of(job.shard.layout(), x)));
}

// A client that was cut off sends its request again, or another, from the first frame on.
TEST(Shard, APushThatBeginsAnewCountsOnce) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table();
  const std::size_t all = Direct(table).shard.layout().frames().size();
  ASSERT_GT(all, 2U);
  for (const bool refused : {false, true})
    for (std::size_t frames = 1; frames < all; ++frames) {
      Direct job(table, 0, 2 * bytes_of(table));  // the parameters, and one push
      const Arrays x = random_of(table, 1), g = random_of(table, 3);
      Arrays lost = random_of(table, 2);
      if (refused) lost[0][0] = std::numeric_limits<float>::quiet_NaN();
      job.send(Op::kSet, 1, x);
      for (int times = 0; times < 2; ++times)
        EXPECT_FALSE(job.send(Op::kPush, 1, lost, 0, 0, frames).has_value());
      EXPECT_EQ(job.send(Op::kPush, 1, g)->refused, Refusal::kNone);
      std::vector<float> w = range_of(job.shard.layout(), x);
      const std::vector<float> pushed = range_of(job.shard.layout(), g);
      for (std::size_t i = 0; i < w.size(); ++i) w[i] -= 0.5F * pushed[i];
      EXPECT_TRUE(same_bits(job.shard.values(), w)) << frames;
      EXPECT_EQ(job.shard.version(), 1U);
      EXPECT_EQ(job.shard.statistics().pushes, 1U);
      EXPECT_EQ(job.shard.statistics().partial, 2U);
    }
}

TEST(Shard, InitialValuesThatBeginAnewAreTakenWhole) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table();
  Arrays lost = random_of(table, 1);
  lost[0][0] = std::numeric_limits<float>::infinity();
  const Arrays x = random_of(table, 2);
  const std::size_t all = Direct(table).shard.layout().frames().size();
  for (std::size_t frames = 1; frames < all; ++frames) {
    Direct job(table);
    EXPECT_FALSE(job.send(Op::kSet, 1, lost, 0, 0, frames).has_value());
    EXPECT_EQ(job.send(Op::kSet, 1, x)->refused, Refusal::kNone);
    EXPECT_TRUE(same_bits(job.shard.values(), range_of(job.shard.layout(), x)));
    EXPECT_EQ(job.shard.version(), 0U);
  }
}

TEST(Shard, RefusesMixedFramesThatNoClientSends) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table();
  for (const bool values : {true, false}) {
    Direct job(table);
    if (values) job.send(Op::kSet, 1, zeros_of(table));
    const ShardLayout& layout = job.shard.layout();
    MessageHeader header;
    header.codec = kMixedCodecs;
    const auto refused = [&](Op op, std::byte codec, std::size_t bytes) {
      const ShardFrame& frame = layout.frames()[0];
      std::vector<std::byte> payload(frame.spans + frame.count * sizeof(float));
      std::fill_n(payload.begin(), frame.spans, codec);
      header.op = op;
      header.flags = kFirst;
      header.count = static_cast<std::uint32_t>(frame.count);
      const ServeMessage message{header, ConstBytes(payload).first(bytes)};
      try {
        op == Op::kSet ? job.shard.set(1, message) : job.shard.push(1, message);
      } catch (const InvalidArgument&) {
        return true;
      }
      return false;
    };
    const ShardFrame& frame = layout.frames()[0];
    const std::size_t whole = frame.spans + frame.count * sizeof(float);
    EXPECT_EQ(refused(Op::kPush, std::byte{99}, whole), values);
    EXPECT_EQ(refused(Op::kPush, std::byte{0}, whole - 1), values);
    EXPECT_EQ(refused(Op::kPush, std::byte{0}, 0), values);
    EXPECT_EQ(refused(Op::kPush, std::byte{1}, whole), values);
    EXPECT_FALSE(refused(Op::kPush, std::byte{0}, whole));
    EXPECT_TRUE(refused(Op::kSet, std::byte{0}, whole));
  }
}

TEST(Shard, RefusesFramesThatNoClientSends) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table();
  Shard shard(table, 0);
  const ShardFrame frame = shard.layout().frames()[0];
  const std::vector<std::byte> payload(frame.count * sizeof(float));
  MessageHeader good;
  good.op = Op::kPush;
  good.flags = kFirst;
  good.count = static_cast<std::uint32_t>(frame.count);
  const auto refused = [&](auto change, std::size_t bytes) {
    MessageHeader header = good;
    change(header);
    EXPECT_THROW(shard.push(1, {header, ConstBytes(payload).first(bytes)}), InvalidArgument);
  };
  refused([](MessageHeader& h) { h.first = 1; }, payload.size());
  refused([](MessageHeader& h) { h.count -= 1; }, payload.size() - 4);
  refused([](MessageHeader& h) { h.flags = kFirst | kLast; }, payload.size());
  refused([](MessageHeader& h) { h.flags = 0; }, payload.size());
  const auto codecs = static_cast<std::uint16_t>(table.codecs.size());
  refused([=](MessageHeader& h) { h.codec = codecs; }, payload.size());
  refused([](MessageHeader& h) { h.extra = 0x7F800000; }, payload.size());
  shard.push(1, {good, payload});  // a good one; then one of another push in its middle
  refused([](MessageHeader& h) { h.flags = 0, h.sequence = 5; }, payload.size());
  MessageHeader pull;
  pull.codec = codecs;
  EXPECT_THROW(shard.begin_pull(1, pull), InvalidArgument);
  pull.codec = 3;
  pull.extra = 1;  // a difference to values that this client has not pulled
  EXPECT_THROW(shard.begin_pull(1, pull), InvalidArgument);
}

TEST(Shard, RefusesAFrameAfterTheLast) {
  const codec::FloatEnvironment environment;
  const ParameterTable table = some_table();
  Direct job(table);
  job.send(Op::kSet, 1, zeros_of(table));
  const ShardFrame frame = job.shard.layout().frames()[0];
  const std::vector<std::byte> payload(frame.count * sizeof(float));
  MessageHeader header;
  header.op = Op::kSet;
  header.flags = 0;
  header.sequence = job.sequence();
  header.count = static_cast<std::uint32_t>(frame.count);
  try {
    job.shard.set(1, {header, payload});
    ADD_FAILURE() << "it was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("out of order"), std::string::npos);
  }
}

}  // namespace serve_requests_test
}  // namespace gradwire::serve
