#include "gradwire/exec/plan/chunk_layout.h"

#include <gtest/gtest.h>

namespace gradwire::exec {
namespace exec_chunk_layout_test {

// Every element of every array is in exactly one span, and arrays are cut at multiples only.
void expect_partition(const std::vector<std::uint64_t>& counts, int chunks, std::size_t alignment,
                      int segments, bool chunks_are_arrays) {
  const ChunkLayout layout(counts, chunks, alignment, chunks_are_arrays);
  std::vector<Span> spans;
  for (int c = 0; c < chunks; ++c)
    for (int s = 0; s < segments; ++s) layout.append(c, s, segments, spans);
  std::vector<std::uint64_t> covered(counts.size(), 0);
  for (const Span& span : spans) {
    ASSERT_EQ(span.offset, covered[span.array]);
    ASSERT_GT(span.count, 0U);
    ASSERT_EQ(span.offset % alignment, 0U);
    covered[span.array] += span.count;
  }
  EXPECT_EQ(covered, counts);
}

TEST(ChunkLayout, CoversEveryElementOnce) {
  for (const auto& counts : std::vector<std::vector<std::uint64_t>>{
           {0}, {1}, {15}, {16}, {17}, {1000003}, {3, 0, 5, 100, 1}, {0, 0, 7}, {64, 64, 64}})
    for (int chunks : {1, 2, 3, 7})
      for (int segments : {1, 2, 5})
        for (std::size_t alignment : {std::size_t{1}, std::size_t{16}, std::size_t{1024}})
          expect_partition(counts, chunks, alignment, segments, false);
}

TEST(ChunkLayout, AChunkCanBeAnArray) {
  expect_partition({5, 0, 900, 33}, 4, 16, 3, true);
  const ChunkLayout layout({5, 0, 900, 33}, 4, 16, true);
  EXPECT_EQ(layout.steps(1), 0U);
  EXPECT_EQ(layout.steps(2), 57U);
}

TEST(ChunkLayout, AChunkCanBeSeveralArrays) {
  expect_partition({5, 40, 900, 0, 33, 7}, 3, 16, 4, true);
  const ChunkLayout layout({5, 40, 900, 0, 33, 7}, 3, 16, true);
  EXPECT_EQ(layout.steps(0), 4U);
  EXPECT_EQ(layout.steps(1), 57U);
  EXPECT_EQ(layout.steps(2), 4U);
}

TEST(ChunkLayout, ChunksDifferByAtMostOneUnit) {
  const ChunkLayout layout({1000003}, 7, 16, false);
  for (int c = 0; c < 7; ++c) EXPECT_NEAR(double(layout.steps(c)), 1000003 / 16.0 / 7, 1.01);
}

}  // namespace exec_chunk_layout_test
}  // namespace gradwire::exec
