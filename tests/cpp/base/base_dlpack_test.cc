#include "gradwire/base/dlpack.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gradwire/base/error.h"

namespace gradwire {
namespace base_dlpack_test {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// float32 [2, 3] on the CPU, in memory that nobody reads.
struct Given {
  std::vector<std::int64_t> shape{2, 3}, strides{3, 1};
  DLTensor tensor;

  Given() {
    tensor.data = &tensor;
    tensor.device_type = 1;
    tensor.code = 2;
    tensor.bits = 32;
    tensor.lanes = 1;
    give();
  }
  void give() {
    tensor.ndim = static_cast<std::int32_t>(shape.size());
    tensor.shape = shape.data();
    tensor.strides = strides.empty() ? nullptr : strides.data();
  }
};

std::string refusal(const DLTensor& tensor) {
  try {
    read_dlpack(tensor);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

std::string refusal(const std::function<void(Given&)>& change) {
  Given given;
  change(given);
  return refusal(given.tensor);
}

TEST(DLPack, SaysWhereAnArrayLies) {
  Given given;
  given.tensor.byte_offset = 8;
  const DLPackArray array = read_dlpack(given.tensor);
  EXPECT_EQ(array.address, reinterpret_cast<std::uintptr_t>(&given.tensor) + 8);
  EXPECT_EQ(array.element_bytes, 4U);
  EXPECT_EQ(array.shape, given.shape);
  EXPECT_TRUE(array.contiguous);
  EXPECT_TRUE(array.writable);
}

TEST(DLPack, RefusesElementsOfSeveralLanes) {
  EXPECT_NE(refusal([](Given& g) { g.tensor.lanes = 2; }).find("2 lanes"), std::string::npos);
  EXPECT_NE(refusal([](Given& g) { g.tensor.lanes = 0; }).find("0 lanes"), std::string::npos);
}

TEST(DLPack, RefusesElementsThatAreNoWholeBytes) {
  for (int bits : {0, 1, 4, 12})
    EXPECT_NE(refusal([bits](Given& g) { g.tensor.bits = static_cast<std::uint8_t>(bits); }), "");
  EXPECT_NE(refusal([](Given& g) { g.tensor.code = 6; }), "");  // bools of 32 bits
}

TEST(DLPack, RefusesShapesThatNoArrayHas) {
  for (const std::int32_t dimensions : {-1, 65, std::numeric_limits<std::int32_t>::min()})
    EXPECT_NE(refusal([=](Given& g) { g.tensor.ndim = dimensions; }), "");
  EXPECT_NE(refusal([](Given& g) { g.tensor.shape = nullptr; }), "");
  for (const auto& shape : {std::vector<std::int64_t>{2, -3},
                            {-1, 0},
                            {kMost},
                            {kMost, kMost},
                            {1LL << 31, 1LL << 31, 1LL << 31}}) {
    Given given;
    given.shape = shape;
    given.strides.clear();
    given.give();
    EXPECT_NE(refusal(given.tensor), "");
  }
}

TEST(DLPack, RefusesMemoryThatIsNotThere) {
  EXPECT_NE(refusal([](Given& g) { g.tensor.data = nullptr; }), "");
  EXPECT_NE(refusal([](Given& g) { g.tensor.byte_offset = ~std::uint64_t{0}; }), "");
  EXPECT_NE(refusal([](Given& g) {
              const auto start = reinterpret_cast<std::uintptr_t>(g.tensor.data);
              g.tensor.byte_offset = ~std::uint64_t{0} - start - 8;  // 24 bytes wrap around
            }),
            "");
}

TEST(DLPack, TakesNothingOfAnySize) {
  Given given;
  given.shape = {0, kMost, kMost};
  given.strides = {1, 1, 1};
  given.tensor.data = nullptr;
  given.tensor.byte_offset = ~std::uint64_t{0};
  given.give();
  const DLPackArray array = read_dlpack(given.tensor);
  EXPECT_EQ(array.address, 0U);
  EXPECT_TRUE(array.contiguous);
}

TEST(DLPack, NoticesGaps) {
  for (const auto& strides : {std::vector<std::int64_t>{4, 1}, {1, 2}, {3, -1}, {0, 0}}) {
    Given given;
    given.strides = strides;
    given.give();
    EXPECT_FALSE(read_dlpack(given.tensor).contiguous);
  }
  Given column;
  column.shape = {1, 3};
  column.strides = {kMost, 1};
  column.give();
  EXPECT_TRUE(read_dlpack(column.tensor).contiguous);
}

TEST(DLPack, KnowsWhatIsNotToBeWritten) {
  Given given;
  DLManagedTensorVersioned managed;
  managed.tensor = given.tensor;
  managed.major = 1;
  EXPECT_TRUE(read_dlpack(managed).writable);
  for (const std::uint64_t flag : {1U, 2U}) {  // read-only; a copy
    managed.flags = flag;
    EXPECT_FALSE(read_dlpack(managed).writable);
  }
  managed.major = 2;
  EXPECT_THROW(read_dlpack(managed), InvalidArgument);
}

}  // namespace base_dlpack_test
}  // namespace gradwire
