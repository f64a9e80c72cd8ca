#include <cstring>

#include "serve_job.h"

namespace gradwire::serve {
namespace serve_message_test {

std::vector<std::byte> frame_of(const MessageHeader& header, std::size_t payload) {
  std::vector<std::byte> frame(sizeof header + payload);
  std::memcpy(frame.data(), &header, sizeof header);
  return frame;
}

MessageHeader good(std::uint32_t length) {
  MessageHeader header;
  header.op = Op::kPush;
  header.length = length;
  return header;
}

TEST(Message, PassesWhatASenderWrites) {
  const ServeMessage message = parse(frame_of(good(24), 24));
  EXPECT_EQ(message.header.op, Op::kPush);
  EXPECT_EQ(message.payload.size(), 24U);
  EXPECT_EQ(parse(frame_of(good(kMostPayload), kMostPayload)).payload.size(), kMostPayload);
}

TEST(Message, RefusesForeignBytes) {
  const auto refused = [](auto change, std::size_t payload = 8) {
    MessageHeader header = good(8);
    change(header);
    EXPECT_THROW(parse(frame_of(header, payload)), InvalidArgument);
  };
  refused([](MessageHeader& h) { h.magic ^= 1; });
  refused([](MessageHeader& h) { h.op = static_cast<Op>(0); });
  refused([](MessageHeader& h) { h.op = static_cast<Op>(10); });
  refused([](MessageHeader& h) { h.flags = 16; });
  refused([](MessageHeader& h) { h.flags = kRefused; });
  refused([](MessageHeader& h) { h.zero = 1; });
  for (int i = 0; i < 3; ++i) refused([i](MessageHeader& h) { h.zeros[i] = 1; });
  refused([](MessageHeader& h) { h.length = 9; });
  refused([](MessageHeader&) {}, 7);
  refused([](MessageHeader& h) { h.length = kMostPayload + 1; }, kMostPayload + 1);
  const auto whole = frame_of(good(0), 0);
  for (std::size_t n = 0; n < whole.size(); ++n)
    EXPECT_THROW(parse(ConstBytes(whole).first(n)), InvalidArgument);
}

TEST(Table, IsReadAsItWasWritten) {
  ParameterTable table = some_table(3, "adagrad:rate=0.02");
  table.atomic_push = true;
  table.max_staleness = 7;
  EXPECT_EQ(ParameterTable::parse(table.text()), table);
  EXPECT_NE(table.mark(), 0);
}

TEST(Table, RefusesWhatItDoesNotWrite) {
  const std::string text = some_table().text();
  for (const std::size_t cut : {std::size_t{0}, std::size_t{5}, text.size() / 2, text.size() - 1})
    EXPECT_THROW(ParameterTable::parse(text.substr(0, cut)), InvalidArgument);
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    other.replace(other.find(from), from.size(), to);
    EXPECT_THROW(ParameterTable::parse(other), InvalidArgument) << to;
  };
  changed("300x211", "300x-1");
  changed("300x211", "99999999999x99999999999");
  changed("300x211", "262144x262144");
  changed("shards 1", "shards 0");
  changed("shards 1", "shards 99999");
  changed("sgd", "sgb");
  changed("codec none", "codec lowrank");
  changed("layer.weight", "layer.bias");
  changed("atomic frame", "atomic frames");
  changed("parameter", "parameters");
}

TEST(Table, RefusesMoreTextThanServersTake) {
  ParameterTable table = some_table();
  table.parameters[0].name = std::string(kMostTableText, 'n');
  EXPECT_THROW(table.check(), InvalidArgument);
}

TEST(Table, SaysHowAnotherDiffers) {
  ParameterTable other = some_table();
  other.parameters[2] = {"layer.gain", {64, 1}};
  EXPECT_EQ(difference(other, some_table()),
            "parameter 2 is 'layer.gain' (64x1), not 'layer.bias' (64)");
}

TEST(Layout, HasEachElementOnceAndFramesThatFit) {
  for (std::uint32_t shards : {1U, 2U, 3U, 7U}) {
    const ParameterTable table = some_table(shards);
    const Codecs codecs = codecs_of(table);
    std::size_t elements = 0;
    for (std::uint32_t i = 0; i < shards; ++i) {
      const ShardLayout layout(table, codecs, i);
      std::size_t next = 0;
      for (const ShardFrame& frame : layout.frames()) {
        EXPECT_EQ(frame.first, next);
        next += frame.count;
        EXPECT_LE(frame.count, kMostFrame);
        for (const auto& codec : codecs) {
          std::size_t bytes = 0;
          for (const ParameterSpan& span : layout.spans(frame))
            bytes += codec->max_bytes(span.count);
          EXPECT_LE(bytes, kMostPayload);
        }
      }
      EXPECT_EQ(next, layout.elements());
      elements += next;
    }
    EXPECT_EQ(elements, table.elements());
  }
}

TEST(Layout, CutsTheSmallestTableIntoShards) {
  ParameterTable table;
  table.parameters = {{"w", {5}}};
  table.shards = 5;
  for (std::uint32_t i = 0; i < 5; ++i)
    EXPECT_EQ(ShardLayout(table, codecs_of(table), i).elements(), 1U);
  EXPECT_THROW(ShardLayout(table, codecs_of(table), 5), InvalidArgument);
}

}  // namespace serve_message_test
}  // namespace gradwire::serve
