// What is said of the GPUs that are there, and of those that are not.
#include "gradwire/cuda/cuda_info.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "gradwire/cuda/device.h"

namespace gradwire::cuda {
namespace {

Api table() { return load_api(GRADWIRE_SIMULATED_CUDA_SO); }

TEST(CudaFacts, EveryDeviceIsDescribed) {
  ::setenv("SIMULATED_CUDA_DEVICES", "2", 1);
  const CudaInfo found = find_cuda_info(GRADWIRE_SIMULATED_CUDA_SO);
  ::unsetenv("SIMULATED_CUDA_DEVICES");
  EXPECT_EQ(found.why_not, "");
  EXPECT_EQ(found.library, GRADWIRE_SIMULATED_CUDA_SO);
  ASSERT_EQ(found.devices.size(), 2U);
  EXPECT_STREQ(found.devices[1].name, "simulated device 1");
  EXPECT_EQ(found.devices[1].memory, std::uint64_t{1} << 30);
}

TEST(CudaFacts, WithoutADeviceTheDriverIsNamed) {
  Api api = table();
  api.versions = [](int* runtime, int* driver) { return *runtime = 12080, *driver = 13010, 0; };
  api.device_count = [](int* count) { return *count = 0, kNoDevice; };
  const CudaInfo found = find_cuda_info(api);
  EXPECT_NE(found.why_not.find("for CUDA 13.1, finds no GPU"), std::string::npos) << found.why_not;
  EXPECT_TRUE(found.devices.empty());
  api.device_count = [](int* count) { return *count = 0; };
  EXPECT_EQ(find_cuda_info(api).why_not, found.why_not);
}

TEST(CudaFacts, AnAbsentDriverAndAnOldOneAreToldApart) {
  Api api = table();
  api.device_count = [](int*) { return kNoDriver; };
  api.versions = [](int* runtime, int* driver) { return *runtime = 13000, *driver = 0; };
  EXPECT_EQ(find_cuda_info(api).why_not, "there is no NVIDIA driver: install driver 580 or newer");
  api.versions = [](int* runtime, int* driver) { return *runtime = 13000, *driver = 12040, 0; };
  EXPECT_EQ(
      find_cuda_info(api).why_not,
      "the driver is for CUDA 12.4, and 13.0 is needed: install driver 580 or newer, or build "
      "gradwire with an older nvcc");
}

TEST(CudaFacts, AnyOtherErrorIsThatOfCuda) {
  Api api = table();
  api.device_info = [](int, DeviceInfo*) { return Status{2}; };
  const CudaInfo found = find_cuda_info(api);
  EXPECT_EQ(found.why_not, "out of memory (2)");
  EXPECT_TRUE(found.devices.empty());
}

TEST(CudaFacts, WithoutGradwiresCudaPartTheReasonIsTheLoaders) {
  const CudaInfo found = find_cuda_info("/nowhere/libgradwire_cuda.so");
  EXPECT_EQ(found.library, "/nowhere/libgradwire_cuda.so");
  EXPECT_NE(found.why_not.find("does not load"), std::string::npos) << found.why_not;
  EXPECT_NE(find_cuda_info("libm.so.6").why_not.find("is not gradwire's CUDA part"),
            std::string::npos);
}

}  // namespace
}  // namespace gradwire::cuda
