// The CUDA part as nvcc built it: what holds whether or not there is a GPU. What it exports and
// needs: tests/python/gpus/test_cuda_build.py.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "gradwire/cuda/device.h"

namespace gradwire::cuda {
namespace {

class CudaPlugin : public testing::Test {
 protected:
  void SetUp() override {
    if (*GRADWIRE_CUDA_PLUGIN == '\0') GTEST_SKIP() << "there was no nvcc to build it";
    api_ = &load_api(GRADWIRE_CUDA_PLUGIN);  // throws unless version and size are the core's
  }
  const Api& api() const { return *api_; }

 private:
  const Api* api_ = nullptr;
};

TEST_F(CudaPlugin, SaysWhetherThereAreGpus) {
  int count = -1;
  const Status status = api().device_count(&count);
  if (status == 0) {
    EXPECT_GT(count, 0);
  } else {
    EXPECT_TRUE(status == kNoDriver || status == kNoDevice) << api().describe(status);
    EXPECT_EQ(count, 0);
  }
}

TEST_F(CudaPlugin, SaysItsVersions) {
  int runtime = -1, driver = -1;
  ASSERT_EQ(api().versions(&runtime, &driver), 0);
  EXPECT_GE(runtime, 12000);
  EXPECT_GE(driver, 0);
}

// Which functions of a table are null; the first is 0, in the order of api.h.
std::vector<std::size_t> missing(const Api& table) {
  constexpr std::size_t kHead = offsetof(Api, describe), kEach = sizeof(Api::describe);
  static_assert((sizeof(Api) - kHead) % kEach == 0, "functions, and nothing else");
  std::vector<std::size_t> found;
  const auto* at = reinterpret_cast<const std::byte*>(&table);
  for (std::size_t i = 0; i < (sizeof(Api) - kHead) / kEach; ++i) {
    void* function = nullptr;
    std::memcpy(&function, at + kHead + i * kEach, kEach);
    if (function == nullptr) found.push_back(i);
  }
  return found;
}

TEST_F(CudaPlugin, HasEveryFunction) { EXPECT_EQ(missing(api()), std::vector<std::size_t>{}); }

TEST(SimulatedPlugin, HasEveryFunction) {
  EXPECT_EQ(missing(load_api(GRADWIRE_SIMULATED_CUDA_SO)), std::vector<std::size_t>{});
}

}  // namespace
}  // namespace gradwire::cuda
