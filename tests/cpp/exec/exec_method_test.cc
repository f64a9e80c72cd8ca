// How calls are carried out, in one table for CPUs and GPUs.
#include "gradwire/exec/plan/method.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace exec_method_test {

constexpr GpuLinks kCpu{};
constexpr GpuLinks kNccl{true, true, true, "nccl"};
constexpr GpuLinks kNcclOnHosts{true, true, false, "nccl"};  // several, of several GPUs
constexpr GpuLinks kLoopback{true, false, true, "loopback"};

struct Call {
  Collective collective = Collective::kAllReduce;
  std::string algorithm = "auto";
  std::string codec = "none";
  int size = 4;
  bool feeds_back = false;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
};

Decision decide(const Call& call, const GpuLinks& links) {
  const std::vector<Array> blocks(static_cast<std::size_t>(call.size), Array{nullptr, 8});
  Request request;
  request.size = call.size;
  request.collective = call.collective;
  request.algorithm = call.algorithm;
  request.dtype = call.dtype;
  request.op = call.op;
  request.codec = codec::make_codec(call.codec);
  const codec::KeyedArray key{"a", 8};
  if (call.feeds_back) request.keys = {&key, 1};
  request.inputs = {blocks.data(),
                    call.collective == Collective::kReduceScatter ? blocks.size() : 1};
  request.outputs = {blocks.data(), call.collective == Collective::kAllGather ? blocks.size() : 1};
  Decision made = exec::decide(request, call.feeds_back, links);
  if (made.algorithm == request.algorithm) made.algorithm = "as asked";
  return made;
}

constexpr Decision kPlan{Method::kPlan, "as asked"}, kDirect{Method::kPlan, "direct"},
    kNative{Method::kNative, "as asked"}, kGathered{Method::kGather, "as asked"},
    kLowRank{Method::kLowRank, "as asked"};

struct Row {
  Call call;
  Decision cpu, nccl, nccl_on_hosts, loopback;
};

TEST(Method, IsDecidedByOneTable) {
  using enum Collective;
  const std::vector<Row> table = {
      {{}, kPlan, kNative, kNative, kPlan},
      {{.algorithm = "ring"}, kPlan, kPlan, kPlan, kPlan},
      {{.algorithm = "gather"}, kPlan, kPlan, kPlan, kPlan},  // of plain arrays
      {{.size = 1}, kPlan, kPlan, kPlan, kPlan},
      {{.dtype = DType::kFloat16}, kPlan, kPlan, kPlan, kPlan},  // added in float32
      {{.op = ReduceOp::kMax}, kPlan, kPlan, kPlan, kPlan},      // NCCL loses NaN
      {{.dtype = DType::kInt32, .op = ReduceOp::kMax}, kPlan, kNative, kNative, kPlan},
      {{.feeds_back = true}, kPlan, kNative, kNative, kPlan},
      {{.collective = kBroadcast}, kPlan, kNative, kNative, kPlan},
      {{.collective = kReduceScatter}, kPlan, kNative, kNative, kPlan},
      {{.collective = kReduceScatter, .feeds_back = true}, kPlan, kPlan, kPlan, kPlan},
      {{.collective = kAllGather}, kPlan, kNative, kNative, kPlan},
      {{.collective = kGather}, kPlan, kPlan, kPlan, kPlan},
      {{.codec = "fp16"}, kPlan, kDirect, kPlan, kPlan},
      {{.codec = "onebit"}, kPlan, kDirect, kPlan, kPlan},
      {{.codec = "onebit", .size = 2}, kGathered, kGathered, kGathered, kGathered},
      {{.collective = kReduce, .codec = "onebit", .size = 2}, kPlan, kPlan, kPlan, kPlan},
      {{.algorithm = "direct", .codec = "onebit", .size = 2}, kPlan, kPlan, kPlan, kPlan},
      {{.codec = "lowrank"}, kLowRank, kLowRank, kLowRank, kLowRank},
      {{.algorithm = "ring", .codec = "lowrank"}, kLowRank, kLowRank, kLowRank, kLowRank},
  };
  for (std::size_t i = 0; i < table.size(); ++i) {
    const Row& row = table[i];
    EXPECT_TRUE(decide(row.call, kCpu) == row.cpu) << "row " << i;
    EXPECT_TRUE(decide(row.call, kNccl) == row.nccl) << "row " << i;
    EXPECT_TRUE(decide(row.call, kNcclOnHosts) == row.nccl_on_hosts) << "row " << i;
    EXPECT_TRUE(decide(row.call, kLoopback) == row.loopback) << "row " << i;
  }
}

// Payloads that are gathered travel by the algorithm in parentheses, or by auto; several peers' are
// gathered by "auto" between CPUs alone.
TEST(Method, OfGatheredPayloads) {
  for (const GpuLinks& links : {kCpu, kNccl, kLoopback}) {
    Request request;
    request.size = 4;
    request.algorithm = "gather(ring)";
    request.codec = codec::make_codec("fp16");
    EXPECT_TRUE(exec::decide(request, false, links) == (Decision{Method::kGather, "ring"}));
    request.algorithm = "gather";
    EXPECT_TRUE(exec::decide(request, false, links) == (Decision{Method::kGather, "auto"}));
    EXPECT_EQ(decide({.codec = "topk:density=0.001"}, links).method,
              links.are_used ? Method::kPlan : Method::kGather);
  }
}

TEST(Method, RefusesAlikeOnBoth) {
  for (const GpuLinks& links : {kCpu, kLoopback}) {
    EXPECT_THROW(decide({.collective = Collective::kReduce, .algorithm = "gather"}, links),
                 ScheduleError);
    EXPECT_THROW(decide({.algorithm = "gather", .codec = "lowrank"}, links), ScheduleError);
    EXPECT_THROW(decide({.collective = Collective::kReduce, .codec = "lowrank"}, links),
                 ScheduleError);
    EXPECT_THROW(decide({.codec = "fp16", .dtype = DType::kInt32}, links), InvalidArgument);
  }
  EXPECT_THROW(decide({.algorithm = "nccl"}, kLoopback), ScheduleError);
  EXPECT_THROW(decide({.algorithm = "nccl", .op = ReduceOp::kMax}, kNccl), ScheduleError);
  EXPECT_EQ(decide({.algorithm = "nccl"}, kNccl).method, Method::kNative);
}

}  // namespace exec_method_test
}  // namespace gradwire::exec
