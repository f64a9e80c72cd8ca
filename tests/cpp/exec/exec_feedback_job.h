// Ranks that call all_reduce with feedback again and again, over every codec and the schedules that
// suit it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "exec_ranks.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::exec {

using codec::ErrorFeedback;
using codec::KeyedArray;
using Values = std::vector<float>;

struct Case {
  std::string codec;
  std::string algorithm;
};

inline const std::vector<Case>& cases() {
  static const std::vector<Case> all = [] {
    std::vector<Case> made;
    for (std::string_view codec : codec::codec_names()) {
      const auto combine = codec::make_codec(codec)->combine();
      if (combine == codec::Combine::kCompound) continue;  // exec_lowrank_test.cc
      made.push_back({std::string(codec), "auto"});
      if (combine == codec::Combine::kPlain) continue;
      for (const char* algorithm : {"ring", "direct", "binary_tree", "gather", "gather(ring)"})
        made.push_back({std::string(codec), algorithm});
    }
    return made;
  }();
  return all;
}

inline Values inputs(int rank, int call, std::size_t n) {
  std::mt19937_64 random(static_cast<std::uint64_t>(1000 * call + rank));
  std::normal_distribution<float> normal;
  Values x(n);
  for (float& value : x) value = normal(random);
  return x;
}

// Several calls of one shape on all ranks, and what they leave behind.
struct Job {
  std::vector<KeyedArray> keys;
  std::vector<Shape> shapes;  // for codecs of matrices; none: vectors
  Travel travel;
  std::vector<std::shared_ptr<ErrorFeedback>> feedback;
  Ranks ranks;
  unsigned calls = 0;

  Job(int count_of_ranks, std::vector<KeyedArray> arrays, Travel how = {},
      codec::ResidualType type = codec::ResidualType::kFloat32)
      : keys(std::move(arrays)),
        travel(how),
        ranks(count_of_ranks, how.transport, how.tuning(), two_hosts(count_of_ranks)) {
    for (int r = 0; r < count_of_ranks; ++r)
      feedback.push_back(std::make_shared<ErrorFeedback>(type));
  }

  static constexpr Rank kRoot = 1;

  static Array array_at(const Values& values, std::size_t first, std::size_t count) {
    auto* data = const_cast<float*>(values.data()) + first;
    return {reinterpret_cast<std::byte*>(data), count};
  }

  // Not every collective has every algorithm.
  static std::string_view algorithm_for(Collective collective, std::string_view name) {
    const bool scatters = collective == Collective::kReduceScatter;
    if (scatters && name == "binary_tree") return "auto";
    if (!scatters && (name == "ring" || name == "direct")) return "star";
    return name;
  }

  std::size_t count() const {
    std::size_t n = 0;
    for (const auto& each : keys) n += each.count;
    return n;
  }

  std::vector<Values> all_reduce(const Case& how, std::vector<Values> x,
                                 ReduceOp op = ReduceOp::kSum) {
    const auto codec = codec::make_codec(how.codec);
    ++calls;
    ranks.run([&](Communicator& comm) {
      const auto r = static_cast<std::size_t>(comm.identity().rank);
      travel.delay(comm.identity().rank, calls);
      std::vector<Array> arrays;
      std::size_t at = 0;
      for (const auto& each : keys) {
        arrays.push_back({reinterpret_cast<std::byte*>(x[r].data() + at), each.count});
        at += each.count;
      }
      Request call;
      call.algorithm = how.algorithm;
      call.op = op;
      call.codec = codec;
      call.feedback = feedback[r];
      call.keys = keys;
      call.shapes = shapes;
      call.inputs = call.outputs = arrays;
      comm.run(call);
    });
    return x;
  }

  // reduce_scatter, or reduce of one key: what each rank has of the result, at its place in the
  // whole.
  std::vector<Values> reduce(Collective collective, const Case& how, const std::vector<Values>& x) {
    const auto codec = codec::make_codec(how.codec);
    const bool scatters = collective == Collective::kReduceScatter;
    std::vector<Values> y(x.size(), Values(scatters ? count() : 0));
    if (!scatters) y[kRoot].resize(count());
    ranks.run([&](Communicator& comm) {
      const auto r = static_cast<std::size_t>(comm.identity().rank);
      const std::size_t block = scatters ? count() / x.size() : count();
      std::vector<Array> in, out;
      for (std::size_t at = 0; at < count(); at += block) in.push_back(array_at(x[r], at, block));
      if (scatters) out = {array_at(y[r], r * block, block)};
      if (!scatters && r == kRoot) out = {array_at(y[r], 0, block)};
      Request call;
      call.collective = collective;
      call.root = scatters ? 0 : kRoot;
      call.algorithm = algorithm_for(collective, how.algorithm);
      call.codec = codec;
      call.feedback = feedback[r];
      call.keys = keys;
      call.inputs = in;
      call.outputs = out;
      comm.run(call);
    });
    return y;
  }

  std::vector<Values> residuals_of(const std::string& key) const {
    std::vector<Values> all;
    for (const auto& each : feedback) all.push_back(each->residual(key));
    return all;
  }

  // The sum of all ranks' residuals, element by element.
  std::vector<double> residuals() const {
    std::vector<double> sums;
    for (const auto& key : keys) {
      std::vector<double> sum(key.count);
      for (const auto& each : feedback) {
        const Values residual = each->residual(key.key);
        for (std::size_t i = 0; i < residual.size(); ++i) sum[i] += residual[i];
      }
      sums.insert(sums.end(), sum.begin(), sum.end());
    }
    return sums;
  }
};

inline void expect_same_bits(const std::vector<Values>& all, const Case& how) {
  for (const Values& each : all)
    ASSERT_TRUE(same_bits(each, all[0])) << how.codec << " " << how.algorithm;
}

}  // namespace gradwire::exec
