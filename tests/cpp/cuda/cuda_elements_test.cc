// Folding, scaling and marking as on CPUs, bit for bit; and what keys keep.
#include <gtest/gtest.h>

#include <vector>

#include "cuda_kernels.h"
#include "gradwire/base/types.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/reduction/fold.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::cuda {
namespace {

using codec::Data;

// Of one run each.
std::byte* bytes_at(void* data) { return static_cast<std::byte*>(data); }

// y := x[0] (op) x[1] (op) …, where x[i] begins at x + i · stride bytes.
Status fold_all(int dtype, int op, void* x, std::size_t stride, int count, void* y, int divisor,
                std::size_t n) {
  const FoldSpan run{bytes_at(x), bytes_at(y), n, 0};
  const GpuPayloads addends{bytes_at(x) + stride, static_cast<std::int64_t>(stride), count - 1};
  return api().fold_spans(dtype, op, &run, 1, addends, divisor, stream());
}
Status fold(int dtype, int op, void* acc, void* x, std::size_t n) {
  const FoldSpan run{bytes_at(acc), bytes_at(acc), n, 0};
  return api().fold_spans(dtype, op, &run, 1, {bytes_at(x), 0, 1}, 1, stream());
}
Status average(int dtype, void* x, int divisor, std::size_t n) {
  return fold_all(dtype, static_cast<int>(ReduceOp::kAvg), x, 0, 1, x, divisor, n);
}
Status fold_wide(int dtype, int op, void* own, float* sum, void* x, void* y, int divisor,
                 std::size_t n) {
  const WideSpan run{bytes_at(own), sum, bytes_at(y), n, 0};
  return api().fold_wide_spans(dtype, op, &run, 1, bytes_at(x), divisor, stream());
}
Status deliver(const SpanFeedback& span_feedback, float* y, std::size_t n) {
  const cuda::GpuSpan run{.x = y, .y = y, .n = n, .span_feedback = span_feedback};
  return api().deliver_spans(&run, 1, stream());
}
Status mark(float* y, std::size_t n, std::size_t unit, std::uint32_t* flags) {
  const cuda::GpuSpan run{.y = y, .n = n};
  return api().mark_spans(&run, 1, unit, flags, stream());
}

class CudaElements : public testing::Test {
 protected:
  std::vector<std::byte> elements(DType dtype, std::size_t n, Data data) {
    return codec::draw_elements(dtype, n, data, random_);
  }
  std::vector<float> floats(std::size_t n, Data data) {
    std::vector<float> values(n);
    for (float& each : values) each = codec::draw_float(data, random_);
    return values;
  }

  codec::FloatEnvironment environment_;
  std::mt19937_64 random_{3};
};

// Around the edges of what one block of threads works on at once, for all sizes of elements; and so
// many that blocks of threads work on several such tiles.
constexpr std::size_t kLengths[] = {0,    1,    2,    17,   255,  1000, 2047, 2048,
                                    2049, 4095, 4096, 4097, 8191, 8192, 8200, 140003};

void fold_on_cpu(int dtype, int op, std::vector<std::byte>& acc, const std::byte* x,
                 std::size_t n) {
  codec::kernels().reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)](acc.data(),
                                                                                         x, n);
}

TEST_F(CudaElements, FoldIsTheCpus) {
  for (int d = 0; d < kDTypes; ++d)
    for (int op = 0; op < kReduceOps; ++op)
      for (std::size_t trial = 0; trial < std::size(kLengths); ++trial) {
        const auto dtype = static_cast<DType>(d);
        if (!is_defined(static_cast<ReduceOp>(op), dtype)) continue;
        const std::size_t n = kLengths[trial], size = size_of(dtype);
        const Data data = codec::kAllData[trial % std::size(codec::kAllData)];
        const auto a = elements(dtype, n, data), b = elements(dtype, n, data);
        auto expected = a;
        fold_on_cpu(d, op, expected, b.data(), n);
        for (const std::size_t shift : {std::size_t{0}, random_() % 16 * size}) {
          const DeviceArray<std::byte> acc(a, 0), x(b, shift);
          RUN(fold(d, op, acc.data(), x.data(), n));
          ASSERT_TRUE(same(acc.values(), expected))
              << name_of(dtype) << " " << name_of(static_cast<ReduceOp>(op)) << " shift " << shift;
          ASSERT_TRUE(same(x.values(), b));
        }
      }
}

TEST_F(CudaElements, FoldsAnArrayIntoItself) {
  for (int d = 0; d < kDTypes; ++d)
    for (int op = 0; op < kReduceOps; ++op) {
      if (!is_defined(static_cast<ReduceOp>(op), static_cast<DType>(d))) continue;
      const auto a = elements(static_cast<DType>(d), 3000, Data::kRandomBits);
      auto expected = a;
      fold_on_cpu(d, op, expected, a.data(), 3000);
      const DeviceArray<std::byte> acc(a, 0);
      RUN(fold(d, op, acc.data(), acc.data(), 3000));
      ASSERT_TRUE(same(acc.values(), expected)) << d << " " << op;
    }
}

TEST_F(CudaElements, FoldAllIsTheCpus) {
  for (int d = 0; d < kDTypes; ++d)
    for (int op = 0; op < kReduceOps; ++op)
      for (const int count : {1, 2, 3, 5, 9}) {
        const auto dtype = static_cast<DType>(d);
        if (!is_defined(static_cast<ReduceOp>(op), dtype)) continue;
        const bool moved = count % 3 == 0;
        const std::size_t n = 700 + random_() % 3000, size = size_of(dtype);
        const std::size_t stride = moved ? (n + 1) * size : (n * size + 31) / 16 * 16;
        const int divisor = op == static_cast<int>(ReduceOp::kAvg) ? 3 : 1;
        const auto all = elements(dtype, static_cast<std::size_t>(count) * stride / size,
                                  count == 2 ? Data::kHuge : Data::kSpecial);
        std::vector<std::byte> kept = all, expected(n * size);
        std::vector<std::byte*> parts;
        for (int i = 0; i < count; ++i)
          parts.push_back(kept.data() + static_cast<std::size_t>(i) * stride);
        codec::fold_all(dtype, static_cast<ReduceOp>(op), parts, 0, expected.data(), divisor, n);
        const DeviceArray<std::byte> x(all, 0);
        const DeviceArray<std::byte> y(std::vector<std::byte>(n * size), moved ? size : 0);
        RUN(fold_all(d, op, x.data(), stride, count, y.data(), divisor, n));
        ASSERT_TRUE(same(y.values(), expected)) << d << " " << op << " of " << count;
        RUN(fold_all(d, op, x.data(), stride, count, x.data(), divisor, n));
        auto in_place = x.values();
        in_place.resize(n * size);
        ASSERT_TRUE(same(in_place, expected)) << d << " " << op << " of " << count;
      }
}

TEST_F(CudaElements, WideFoldsAreTheCpus) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProd})
      for (const std::size_t n : kLengths)
        for (const Data data : {Data::kNormal, Data::kSpecial, Data::kHuge}) {
          const int d = static_cast<int>(dtype), o = static_cast<int>(op);
          const int divisor = op == ReduceOp::kAvg ? 3 : 1;
          std::vector<std::byte> of[3], expected(2 * n);
          for (auto& each : of) each = elements(dtype, n, data);
          std::byte* const parts[] = {of[0].data(), of[1].data(), of[2].data()};
          codec::fold_all(dtype, op, parts, 0, expected.data(), divisor, n);
          const std::size_t shift = n % 2 * 2;
          const DeviceArray<std::byte> own(of[0], shift), x(of[1], 0), y(of[2], shift);
          const DeviceArray<float> sum(std::vector<float>(n), 0);
          RUN(fold_wide(d, o, own.data(), sum.data(), x.data(), nullptr, 1, n));
          RUN(fold_wide(d, o, nullptr, sum.data(), y.data(), own.data(), divisor, n));
          ASSERT_TRUE(same(own.values(), expected)) << name_of(dtype) << " " << name_of(op) << n;
        }
}

TEST_F(CudaElements, ScaleIsTheCpus) {
  for (int d = 0; d < kDTypes; ++d)
    for (const double factor : {1.0 / 3, 1.0, -7e4, 0.0})
      for (const std::size_t n : kLengths) {
        const auto dtype = static_cast<DType>(d);
        if (codec::kernels().scale[static_cast<std::size_t>(d)] == nullptr) continue;
        const auto x = elements(dtype, n, Data::kRandomBits);
        auto expected = x;
        codec::kernels().scale[static_cast<std::size_t>(d)](expected.data(), factor, n);
        const DeviceArray<std::byte> y(x, n % 3 * size_of(dtype));
        RUN(api().scale(d, y.data(), factor, n, stream()));
        ASSERT_TRUE(same(y.values(), expected)) << name_of(dtype) << " by " << factor;
      }
}

TEST_F(CudaElements, AverageIsTheCpus) {
  for (int d = 0; d < kDTypes; ++d)
    for (const int ranks : {2, 3, 200})
      for (const std::size_t n : kLengths) {
        const auto dtype = static_cast<DType>(d);
        if (!is_defined(ReduceOp::kAvg, dtype)) continue;
        const auto x = elements(dtype, n, Data::kRandomBits);
        auto expected = x;
        codec::average(dtype, expected.data(), ranks, n);
        const DeviceArray<std::byte> y(x, n % 3 * size_of(dtype));
        RUN(average(d, y.data(), ranks, n));
        ASSERT_TRUE(same(y.values(), expected)) << name_of(dtype) << " over " << ranks;
      }
}

TEST_F(CudaElements, RefusesWhatCpusHaveNot) {
  for (int d = 0; d < kDTypes; ++d)
    for (int op = 0; op < kReduceOps; ++op) {
      if (is_defined(static_cast<ReduceOp>(op), static_cast<DType>(d))) continue;
      const DeviceArray<std::uint64_t> y({1, 2, 3, 4});
      EXPECT_NE(fold(d, op, y.data(), y.data() + 2, 1), 0) << d << " " << op;
    }
  const DeviceArray<int> x({1, 2});
  EXPECT_NE(api().scale(static_cast<int>(DType::kInt32), x.data(), 0.5, 2, stream()), 0);
  EXPECT_NE(fold_all(kDTypes, 0, x.data(), 4, 2, x.data(), 1, 1), 0);
  EXPECT_NE(fold_all(0, 0, x.data(), 4, 0, x.data(), 1, 1), 0);
  EXPECT_EQ(x.values(), (std::vector<int>{1, 2}));
}

TEST_F(CudaElements, DeliversTheResidual) {
  for (const std::size_t n : kLengths)
    for (const std::uint32_t which : {0U, 1U}) {
      const auto x = floats(n, Data::kSpecial), e = floats(n, Data::kRandomBits);
      auto expected = x;
      codec::kernels().reduce[0][0](expected.data(), e.data(), n);
      const DeviceArray<float> y(x, which);
      const DeviceFeedback feedback(e, n % 2, which);
      RUN(deliver(feedback.span_feedback(), y.data(), n));
      ASSERT_TRUE(same(y.values(), expected)) << n;
      ASSERT_TRUE(same(feedback.before(), e));
      ASSERT_TRUE(same(feedback.after(), std::vector<float>(n, 0.0F)));
    }
}

TEST_F(CudaElements, DeliversNothingWithoutFeedback) {
  const DeviceArray<float> y({-0.0F, 2.0F});
  RUN(deliver({}, y.data(), 2));
  EXPECT_TRUE(same(y.values(), {-0.0F, 2.0F}));
}

TEST_F(CudaElements, MarksUnitsThatAreNotFinite) {
  for (const char* name : {"fp16", "int8:block=32", "onebit", "int8:block=4096", "topk"})
    for (const std::size_t units : {0, 1, 3, 600})
      for (const int bad : {0, 1, 2}) {
        const auto codec = codec::make_codec(name);
        const std::size_t n =
            units * codec->block() + random_() % std::min(codec->block(), std::size_t{999});
        auto x = floats(n, Data::kHuge);
        for (int i = 0; i < bad && n > 0; ++i) x[random_() % n] = i == 0 ? INFINITY : -NAN;
        auto expected = x;
        const bool finite = codec::mark_not_finite(*codec, expected.data(), n);
        const DeviceArray<float> y(x, static_cast<std::size_t>(bad));
        const DeviceArray<std::uint32_t> flags({kRefused});
        RUN(mark(y.data(), n, codec->block(), flags.data()));
        ASSERT_TRUE(same(y.values(), expected)) << name << " n=" << n;
        ASSERT_EQ(flags.value(), finite ? kRefused : kRefused | kNotFinite) << name;
      }
}

TEST_F(CudaElements, PoisonsWhereAFlagIsSet) {
  for (const std::size_t n : {0, 1, 300000})
    for (const std::uint32_t flag : {0U, 1U, 2U}) {
      const std::vector<float> x(n, 1.5F);
      const DeviceArray<float> y(x), other(x);
      const std::vector<float> ones(70, 1);
      const DeviceArray<float> small(ones);
      const DeviceArray<std::uint32_t> flags({flag});
      std::vector<cuda::GpuSpan> runs{{.y = y.data(), .n = n}, {}};
      for (std::size_t i = 0; i < 60; ++i) runs.push_back({.y = small.data() + i, .n = i % 2});
      RUN(api().poison(runs.data(), static_cast<int>(runs.size()), flags.data(), stream()));
      constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
      ASSERT_TRUE(same(y.values(), flag == 0 ? x : std::vector<float>(n, kNan)));
      ASSERT_TRUE(same(other.values(), x));
      std::vector<float> expected = ones;
      for (std::size_t i = 1; i < 60 && flag != 0; i += 2) expected[i] = kNan;
      ASSERT_TRUE(same(small.values(), expected));
    }
}

GpuKeyState key_state_of(std::uint32_t which) {
  GpuKeyState key_state{.which = which, .which_memory = 1, .calls = 5, .codec_state = {}};
  key_state.codec_state[which] = {.tau = 2, .sent = 4, .largest = 5};
  key_state.codec_state[which ^ 1U] = {.tau = 6, .sent = 8, .largest = 9};
  return key_state;
}

TEST_F(CudaElements, KeysOpenAndSettle) {
  for (const std::uint32_t which : {0U, 1U})
    for (const std::uint32_t flag : {0U, 1U})
      for (const bool remembers : {false, true}) {
        const std::size_t count = which == 0 ? 3 : 700;
        const DeviceArray<GpuKeyState> key_states(
            std::vector<GpuKeyState>(count, key_state_of(which)));
        std::vector<GpuKeyState*> pointers;
        for (std::size_t i = 0; i < count; ++i) pointers.push_back(key_states.data() + i);
        const DeviceArray<GpuKeyState*> list(pointers);
        const DeviceArray<std::uint32_t> flags({flag});
        RUN(api().open(list.data(), count, stream()));
        for (const GpuKeyState& each : key_states.values()) {
          const GpuCodecState& last = each.codec_state[which];
          const GpuCodecState& open = each.codec_state[which ^ 1U];
          ASSERT_EQ(each.which, which);
          ASSERT_EQ(last.sent, 4U);
          ASSERT_EQ(open.tau, 2);
          ASSERT_EQ(open.sent, 0U);
          ASSERT_EQ(open.largest, 0U);
        }
        RUN(api().settle(list.data(), count, remembers, flags.data(), stream()));
        for (const GpuKeyState& each : key_states.values()) {
          ASSERT_EQ(each.which, flag == 0 ? which ^ 1U : which);
          ASSERT_EQ(each.which_memory, flag == 0 && remembers ? 0U : 1U);
          ASSERT_EQ(each.calls, flag == 0 ? 6U : 5U);
        }
      }
}

TEST_F(CudaElements, WhatWasSentIsCleared) {
  for (const std::uint32_t which : {0U, 1U})
    for (std::size_t n : kLengths) {
      const std::vector<float> x = floats(n, Data::kNormal);
      std::vector<float> kept = floats(n, Data::kNormal), expected = x;
      for (std::size_t i = 0; i < n; ++i) {
        if (i % 3 == 0) kept[i] = i % 2 == 0 ? 0.0F : -0.0F;
        if (i % 3 == 0) expected[i] = 0;
      }
      const DeviceArray<float> y(x), residual(kept), other(std::vector<float>(n, 0.0F));
      const DeviceArray<GpuKeyState> key_state({key_state_of(which)});
      SpanFeedback span_feedback{{residual.data(), other.data()}, key_state.data()};
      if (which == 1) std::swap(span_feedback.residual[0], span_feedback.residual[1]);
      const cuda::GpuSpan run{.y = y.data(), .n = n, .span_feedback = span_feedback};
      RUN(api().clear_sent(&run, 1, stream()));
      ASSERT_TRUE(same(y.values(), expected)) << n;
    }
}

TEST_F(CudaElements, NothingIsDoneWithNothing) {
  RUN(api().clear_sent(nullptr, 0, stream()));
  RUN(fold(0, 0, nullptr, nullptr, 0));
  RUN(fold_all(0, 0, nullptr, 0, 3, nullptr, 1, 0));
  RUN(api().scale(0, nullptr, 2, 0, stream()));
  RUN(mark(nullptr, 0, 1, nullptr));
  RUN(api().poison(nullptr, 0, nullptr, stream()));
  RUN(api().open(nullptr, 0, stream()));
  RUN(api().settle(nullptr, 0, true, nullptr, stream()));
  check(api(), api().synchronize(stream()), "synchronize");
}

}  // namespace
}  // namespace gradwire::cuda
