// Calls whose results on GPUs must have the bits of CPUs, and that comparison.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <random>

#include "cuda_ranks.h"

namespace gradwire::cuda {

inline std::vector<float> values(Rank rank, std::size_t n, unsigned seed) {
  std::mt19937 random(seed * 64 + static_cast<unsigned>(rank));
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& each : x) each = normal(random);
  return x;
}

inline void expect_same(const Outcome& gpu, const Outcome& cpu, const std::string& what) {
  for (std::size_t r = 0; r < cpu.results.size(); ++r) {
    ASSERT_EQ(gpu.results[r].size(), cpu.results[r].size()) << what;
    for (std::size_t i = 0; i < cpu.results[r].size(); ++i)
      EXPECT_TRUE(gpu.results[r][i] == cpu.results[r][i])
          << what << ": result " << i << " of rank " << r;
    ASSERT_EQ(gpu.kept[r].size(), cpu.kept[r].size()) << what;
    for (const auto& [key, kept] : cpu.kept[r]) {
      const auto& its = gpu.kept[r].at(key);
      EXPECT_EQ(its.calls, kept.calls) << what;
      EXPECT_TRUE(exec::same_bits(its.residual, kept.residual)) << what << ": residual of " << key;
      EXPECT_TRUE(exec::same_bits(its.memory, kept.memory)) << what << ": memory of " << key;
      EXPECT_EQ(its.codec_state.tau, kept.codec_state.tau) << what;
    }
  }
}

// Arrays of any dtype, whose bytes are small integers of it.
inline std::vector<std::byte> small(DType dtype, Rank rank, std::size_t n) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < n; ++i) {
    const int value = static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 13) % 5);
    const auto add = [&](auto typed) {
      const auto* at = reinterpret_cast<const std::byte*>(&typed);
      bytes.insert(bytes.end(), at, at + sizeof typed);
    };
    switch (dtype) {
      case DType::kFloat32:
        add(static_cast<float>(value) * 0.37F);
        break;
      case DType::kFloat64:
        add(static_cast<double>(value) * 0.37);
        break;
      case DType::kFloat16:
      case DType::kBFloat16:
        add(static_cast<std::uint16_t>(0x3C00 + value * 77));
        break;
      case DType::kInt32:
      case DType::kUInt32:
        add(static_cast<std::int32_t>(value));
        break;
      case DType::kInt64:
      case DType::kUInt64:
        add(static_cast<std::int64_t>(value));
        break;
      case DType::kInt16:
      case DType::kUInt16:
        add(static_cast<std::int16_t>(value));
        break;
      case DType::kComplex64:
        add(std::complex<float>(static_cast<float>(value) * 0.37F, 1.1F));
        break;
      case DType::kComplex128:
        add(std::complex<double>(value * 0.37, 1.1));
        break;
      default:
        add(static_cast<std::uint8_t>(value));
    }
  }
  return bytes;
}

// The arrays that a collective takes, of n elements, or of blocks of n.
inline Case arrays_for(Collective collective, DType dtype, int p, Rank root, std::size_t n) {
  Case of;
  of.request.collective = collective;
  of.request.dtype = dtype;
  of.request.root = root;
  const std::size_t bytes = n * size_of(dtype);
  for (Rank r = 0; r < p; ++r) {
    const bool at_root = r == root;
    const auto one = [&](int copies) {
      Arrays made;
      for (int i = 0; i < copies; ++i) made.push_back(small(dtype, r * p + i, n));
      return made;
    };
    const auto room = [&](int copies) {
      return std::vector<std::size_t>(static_cast<std::size_t>(copies), bytes);
    };
    switch (collective) {
      case Collective::kAllReduce:
        of.inputs.push_back(one(1)), of.outputs.push_back(room(1));
        break;
      case Collective::kReduce:
        of.inputs.push_back(one(1)), of.outputs.push_back(room(at_root ? 1 : 0));
        break;
      case Collective::kBroadcast:
        of.inputs.push_back(one(at_root ? 1 : 0)), of.outputs.push_back(room(1));
        break;
      case Collective::kReduceScatter:
        of.inputs.push_back(one(p)), of.outputs.push_back(room(1));
        break;
      case Collective::kAllGather:
        of.inputs.push_back(one(1)), of.outputs.push_back(room(p));
        break;
      case Collective::kGather:
        of.inputs.push_back(one(1)), of.outputs.push_back(room(at_root ? p : 0));
        break;
      case Collective::kScatter:
        of.inputs.push_back(one(at_root ? p : 0)), of.outputs.push_back(room(1));
        break;
      case Collective::kAllToAll:
        of.inputs.push_back(one(p)), of.outputs.push_back(room(p));
        break;
    }
  }
  return of;
}

inline std::string label(const Case& of, std::string_view algorithm) {
  return std::string(name_of(of.request.collective)) + " by " + std::string(algorithm) + " of " +
         std::string(name_of(of.request.dtype)) + " " + std::string(name_of(of.request.op)) +
         " p=" + std::to_string(of.inputs.size()) + " codec " + of.codec;
}

// Floats with feedback, three calls of the same inputs, and several keys.
inline Case coded(std::string_view codec, Collective collective, std::string_view algorithm, int p,
                  std::size_t n, bool feedback) {
  Case of = arrays_for(collective, DType::kFloat32, p, 0, n);
  for (Rank r = 0; r < p; ++r)
    for (std::size_t i = 0; i < of.inputs[static_cast<std::size_t>(r)].size(); ++i)
      of.inputs[static_cast<std::size_t>(r)][i] =
          bytes_of(values(r, n, static_cast<unsigned>(i + 1)));
  of.codec = codec;
  of.request.algorithm = algorithm;
  of.request.op = ReduceOp::kAvg;
  of.calls = feedback ? 3 : 1;
  if (!feedback) return of;
  std::size_t whole = 0;
  for (const auto& each : of.inputs[0]) whole += each.size() / sizeof(float);
  of.keys = {{"only", whole}};
  return of;
}

inline constexpr std::string_view kCodecs[] = {"fp16",
                                               "bf16",
                                               "fp16:scale=1024",
                                               "int8",
                                               "int8:rounding=stochastic,seed=5",
                                               "int8:block=96",
                                               "int4",
                                               "int4:block=64,rounding=stochastic,seed=5",
                                               "onebit",
                                               "onebit:block=64",
                                               "threshold",
                                               "threshold:tau=0.5",
                                               "topk",
                                               "topk:density=0.3,values=fp16"};

// More arrays than one launch takes, of odd lengths: some mostly zero, so that onebit sends masks.
inline Case many_arrays(std::string_view codec, std::string_view algorithm, int p, DType dtype,
                        bool is_finite) {
  Case of;
  of.request.algorithm = algorithm;
  of.request.dtype = dtype;
  of.request.op = ReduceOp::kAvg;
  of.codec = codec;
  of.calls = 2;
  of.inputs.resize(static_cast<std::size_t>(p));
  of.outputs.resize(static_cast<std::size_t>(p));
  for (std::size_t i = 0; i < kMostSpans + 5; ++i) {
    const std::size_t n = i == 7 ? 2500 : 1 + i * 13 % 70;
    for (Rank r = 0; r < p; ++r) {
      const auto me = static_cast<std::size_t>(r);
      std::vector<float> x = values(r, n, static_cast<unsigned>(i));
      for (std::size_t k = 0; i % 3 == 1 && k < n; ++k)
        if (k % 5 != me % 5) x[k] = 0;
      if (!is_finite && i == 3 && r == 1) x[0] = INFINITY;
      const bool wide = dtype == DType::kFloat32;
      of.inputs[me].push_back(wide ? bytes_of(x) : small(dtype, r, n));
      of.outputs[me].push_back(n * size_of(dtype));
    }
    if (dtype == DType::kFloat32) of.keys.push_back({"key " + std::to_string(i), n});
  }
  return of;
}

}  // namespace gradwire::cuda
