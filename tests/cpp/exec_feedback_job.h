// Ranks that call all_reduce with feedback again and again, over every codec and the schedules that
// suit it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "exec_ranks.h"
#include "gradwire/codec/simd.h"

namespace gradwire::exec {

using codec::ErrorFeedback;
using codec::KeyedExtent;
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
      if (combine == codec::Combine::kCompound) continue;  // exec_low_rank_test.cc
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

// How a job's frames travel: none of it may change a bit.
struct Travel {
  std::string_view transport = "inproc";
  std::size_t segment_bytes = 8192;  // so that several are on their way
  bool delays = false;               // ranks come late, each by its own time
};

// Several calls of one shape on all ranks, and what they leave behind.
struct Job {
  std::vector<KeyedExtent> keys;
  Travel travel;
  std::vector<std::shared_ptr<ErrorFeedback>> feedback;
  Ranks ranks;

  Job(int count_of_ranks, std::vector<KeyedExtent> extents, Travel how = {})
      : keys(std::move(extents)), travel(how), ranks(count_of_ranks, how.transport, tuning()) {
    for (int r = 0; r < count_of_ranks; ++r) feedback.push_back(std::make_shared<ErrorFeedback>());
  }

  Tuning tuning() const {
    Tuning made;
    made.segment_bytes = travel.segment_bytes;
    return made;
  }

  std::size_t count() const {
    std::size_t n = 0;
    for (const auto& each : keys) n += each.count;
    return n;
  }

  std::vector<Values> all_reduce(const Case& how, std::vector<Values> x,
                                 ReduceOp op = ReduceOp::kSum) {
    const auto codec = codec::make_codec(how.codec);
    ranks.run([&](Communicator& comm) {
      const auto r = static_cast<std::size_t>(comm.identity().rank);
      if (travel.delays) std::this_thread::sleep_for(std::chrono::microseconds(r * 7919 % 500));
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
      call.inputs = call.outputs = arrays;
      comm.run(call);
    });
    return x;
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
    ASSERT_EQ(std::memcmp(each.data(), all[0].data(), 4 * each.size()), 0)
        << how.codec << " " << how.algorithm;
}

}  // namespace gradwire::exec
