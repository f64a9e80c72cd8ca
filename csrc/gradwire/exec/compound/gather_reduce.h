// GatherReduce: each rank encodes its whole input once, all payloads go to all ranks, and each adds
// them up in rank order. It loses once instead of once per hop, at the price of p - 1 payloads per
// rank.
#pragma once

#include <string>
#include <vector>

#include "gradwire/exec/compound/compound.h"
#include "gradwire/exec/compound/payloads.h"

namespace gradwire::exec {

class GatherReduce final : public CompoundCollective {
 public:
  const Request& probe() override { return payloads_.lengths(0); }
  const Request* next(const Progress& progress) override;

 private:
  void begin() override;
  void place_extents();
  const Request& encode(std::uint32_t operation);
  const Request* add_up();
  void take_part(Rank from, std::size_t extent);
  bool sum(std::size_t extent, float* y);
  void check_ends() const;
  Rank blame(std::size_t extent) const;
  [[noreturn]] void refuse(Rank from, const std::string& why) const;
  const Request* deliver_alone();
  const float* input(std::size_t extent) const;
  float* output(std::size_t extent) const;

  int phase_ = 0;
  std::size_t runs_ = 1;              // extents per array
  std::vector<std::size_t> offsets_;  // of each extent in its array
  std::size_t limit_ = 0;             // the most bytes of a payload
  FeedbackView feedback_;
  Payloads payloads_;
  std::vector<std::size_t> starts_;  // by rank: where its part of the next extent begins
  std::vector<ConstBytes> parts_;    // by rank: its part of one extent
};

}  // namespace gradwire::exec
