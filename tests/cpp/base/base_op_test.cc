#include "gradwire/base/op.h"

#include <gtest/gtest.h>

#include "gradwire/base/error.h"

namespace gradwire {
namespace base_op_test {

OpSpec all_reduce_of(std::uint64_t count) {
  return {Collective::kAllReduce,
          DType::kFloat32,
          ReduceOp::kSum,
          0,
          {count},
          "ring",
          7,
          "none",
          0,
          ""};
}

TEST(OpSpec, EveryFieldChangesTheFingerprint) {
  const OpSpec base = all_reduce_of(1000);
  std::vector<OpSpec> others(9, base);
  others[0].collective = Collective::kReduce;
  others[1].dtype = DType::kFloat64;
  others[2].op = ReduceOp::kMax;
  others[3].root = 1;
  others[4].counts = {500, 500};
  others[5].algorithm = "direct";
  others[6].schedule_digest = 8;
  others[7].codec = "fp16";
  others[8].model = 1;
  for (const OpSpec& other : others) EXPECT_NE(base.fingerprint(), other.fingerprint());
}

TEST(OpSpec, FingerprintIsStableAcrossMachines) {
  EXPECT_EQ(all_reduce_of(1000).fingerprint(), all_reduce_of(1000).fingerprint());
  EXPECT_EQ(Fnv1a().bytes("a", 1).digest(), 0xaf63dc4c8601ec8cULL);  // the published test vector
}

TEST(OpSpec, TextSaysWhatTheCallWas) {
  OpSpec spec = all_reduce_of(1000);
  EXPECT_EQ(spec.to_string(), "all_reduce(float32[1000], op=sum, algorithm=ring #7, codec=none)");
  spec.schedule_digest = 0;
  spec.counts = {4, 6};
  EXPECT_EQ(spec.to_string(), "all_reduce(float32[4, 6], op=sum, algorithm=ring, codec=none)");
  spec.model = 120007;
  EXPECT_EQ(spec.to_string(),
            "all_reduce(float32[4, 6], op=sum, algorithm=ring, codec=none, by cost model #7)");
}

TEST(OpSpec, ManyCountsThatDifferLookDifferent) {
  OpSpec one = all_reduce_of(0), other = all_reduce_of(0);
  one.counts.assign(100, 5);
  other.counts.assign(100, 5);
  EXPECT_EQ(one.to_string(), other.to_string());
  std::swap(++other.counts[3], --other.counts[4]);
  EXPECT_NE(one.to_string(), other.to_string());
  EXPECT_NE(one.to_string().find("float32[500 in 100 parts #"), std::string::npos);
}

TEST(Types, NamesRoundTripAndUnknownOnesListTheKnown) {
  for (int i = 0; i < kDTypes; ++i)
    EXPECT_EQ(parse_dtype(name_of(static_cast<DType>(i))), static_cast<DType>(i));
  try {
    parse_dtype("float99");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("bfloat16"), std::string::npos);
  }
}

TEST(OpSpec, TellsTypesApartThatMoveAsTheSameBytes) {
  OpSpec seconds = all_reduce_of(8), days = all_reduce_of(8);
  seconds.moved = "datetime64[s]";
  days.moved = "datetime64[D]";
  EXPECT_NE(seconds.fingerprint(), days.fingerprint());
  EXPECT_NE(seconds.fingerprint(), all_reduce_of(8).fingerprint());
  EXPECT_NE(seconds.to_string().find("datetime64[s] as float32[8]"), std::string::npos);
}

}  // namespace base_op_test
}  // namespace gradwire
