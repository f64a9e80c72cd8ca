// gradwire's own words for NCCL's binary interface, against the real header where it is.
#include <gtest/gtest.h>

#include "gradwire/cuda/nccl/nccl_abi.h"

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>

namespace ours = gradwire::cuda::nccl;

static_assert(sizeof(ours::UniqueId) == sizeof(ncclUniqueId));
static_assert(alignof(ours::UniqueId) == alignof(ncclUniqueId));

#define SAME_FIELD(field, theirs)                                                  \
  static_assert(offsetof(ours::Config, field) == offsetof(ncclConfig_t, theirs) && \
                sizeof(ours::Config::field) == sizeof(ncclConfig_t::theirs))
SAME_FIELD(size, size);
SAME_FIELD(magic, magic);
SAME_FIELD(version, version);
SAME_FIELD(blocking, blocking);
SAME_FIELD(cga_cluster_size, cgaClusterSize);
static_assert(sizeof(ours::Config) <= sizeof(ncclConfig_t));
static_assert(sizeof(ours::Result) == sizeof(ncclResult_t));
static_assert(sizeof(ours::DataType) == sizeof(ncclDataType_t));

#define SAME_VALUE(name, theirs) static_assert(static_cast<int>(ours::name) == theirs)
SAME_VALUE(kSuccess, ncclSuccess);
SAME_VALUE(kUnhandledCudaError, ncclUnhandledCudaError);
SAME_VALUE(kSystemError, ncclSystemError);
SAME_VALUE(kInternalError, ncclInternalError);
SAME_VALUE(kInvalidArgument, ncclInvalidArgument);
SAME_VALUE(kInvalidUsage, ncclInvalidUsage);
SAME_VALUE(kRemoteError, ncclRemoteError);
SAME_VALUE(kInProgress, ncclInProgress);
SAME_VALUE(kInt8, ncclInt8);
SAME_VALUE(kUint8, ncclUint8);
SAME_VALUE(kInt32, ncclInt32);
SAME_VALUE(kUint32, ncclUint32);
SAME_VALUE(kInt64, ncclInt64);
SAME_VALUE(kUint64, ncclUint64);
SAME_VALUE(kFloat16, ncclFloat16);
SAME_VALUE(kFloat32, ncclFloat32);
SAME_VALUE(kFloat64, ncclFloat64);
SAME_VALUE(kBfloat16, ncclBfloat16);
SAME_VALUE(kSum, ncclSum);
SAME_VALUE(kProd, ncclProd);
SAME_VALUE(kMax, ncclMax);
SAME_VALUE(kMin, ncclMin);
SAME_VALUE(kAvg, ncclAvg);

TEST(NcclAbi, IsThatOfTheHeader) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const ours::Config mine;
  EXPECT_EQ(mine.magic, theirs.magic);
  EXPECT_LE(mine.version, theirs.version);
  EXPECT_EQ(mine.blocking, theirs.blocking);
  EXPECT_EQ(mine.cga_cluster_size, theirs.cgaClusterSize);
}

// Assigned to pointers of gradwire's types by way of what each parameter is in the machine.
template <typename Returned, typename... Given>
constexpr std::size_t parameters(Returned (*)(Given...)) {
  return sizeof...(Given);
}
static_assert(parameters(&ncclCommInitRankConfig) == 5);
static_assert(parameters(&ncclSend) == 6 && parameters(&ncclRecv) == 6);
static_assert(parameters(&ncclAllReduce) == 7 && parameters(&ncclReduceScatter) == 7);
static_assert(parameters(&ncclAllGather) == 6 && parameters(&ncclBroadcast) == 7);
static_assert(parameters(&ncclReduce) == 8);
#if NCCL_VERSION_CODE >= 22800
static_assert(parameters(&ncclAlltoAll) == 6);
#endif
static_assert(sizeof(ours::RedOp) == sizeof(ncclRedOp_t));
static_assert(parameters(&ncclCommGetAsyncError) == 2 && parameters(&ncclGetLastError) == 1);
#else
TEST(NcclAbi, IsThatOfTheHeader) { GTEST_SKIP() << "no <nccl.h> with CUDA's headers"; }
#endif
