// OpSpec: everything the ranks must agree on for one operation. Its fingerprint travels in every
// frame header, its text in the error that a disagreement causes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gradwire/base/types.h"

namespace gradwire {

struct OpSpec {
  Collective collective = Collective::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  std::vector<std::uint64_t> counts;  // elements of each array, in order
  std::string algorithm;              // the schedule's name
  std::uint64_t schedule_digest = 0;  // digest of its text: two schedules of one name differ
  std::string codec;                  // canonical, with parameters: "none", "topk:density=0.001"
  std::uint64_t model = 0;            // digest of the cost model that chose; 0: the caller chose
  std::string moved;  // the caller's element type, where elements are moved as `dtype`

  // Returns FNV-1a over every field, folded to 32 bits; the same on every machine.
  std::uint32_t fingerprint() const;
  // Returns "all_reduce(float32[1000], op=sum, algorithm=ring, codec=fp16)". A user's own schedule
  // and a long list of counts get a short digest, so that calls that differ look different.
  std::string to_string() const;
};

// 64-bit FNV-1a, for digests that must be the same everywhere.
class Fnv1a {
 public:
  Fnv1a& bytes(const void* data, std::size_t size) noexcept;
  Fnv1a& number(std::uint64_t value) noexcept { return bytes(&value, sizeof value); }
  Fnv1a& text(const std::string& value) noexcept {
    return number(value.size()).bytes(value.data(), value.size());
  }
  std::uint64_t digest() const noexcept { return state_; }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325ULL;
};

}  // namespace gradwire
