// PlanCache: from a request to its plan, without allocating when the same shape was seen before.
// Also decides what algorithm="auto" means, from what all ranks know alike.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gradwire/exec/operation.h"
#include "gradwire/exec/plan.h"

namespace gradwire::exec {

// The algorithm for a collective of `bytes` on `ranks` ranks with a codec that may need an in-tree
// schedule. A rule of thumb, the same on all ranks; measured models come later.
std::string choose_algorithm(Collective collective, std::uint64_t bytes, int ranks, bool lossy);

class PlanCache {
 public:
  struct Setting {
    Rank rank = 0;
    int size = 1;
    std::vector<std::vector<Rank>> hosts;
    std::size_t max_message = 0;
    std::size_t segment_bytes = 0;
  };
  explicit PlanCache(Setting setting) : setting_(std::move(setting)) {}

  // Throws ScheduleError or InvalidArgument when the request makes no valid plan.
  std::shared_ptr<const Plan> find(const Request& request, const std::vector<int>& link_of);

 private:
  struct Key {
    std::uint64_t digest = 0;  // of everything below, to look up quickly
    Collective collective;
    DType dtype;
    ReduceOp op;
    Rank root = 0;
    std::string algorithm;
    std::uint64_t schedule_digest = 0;
    const codec::Codec* codec = nullptr;  // kept alive by the plan
    std::string codec_label;
    std::vector<std::uint64_t> counts;
  };
  struct Entry {
    Key key;
    std::shared_ptr<const Plan> plan;
  };
  bool matches(const Key& key, const Request& request, std::uint64_t digest) const;
  std::shared_ptr<const Plan> make(const Request& request, const std::vector<int>& link_of,
                                   std::uint64_t digest);
  schedule::Schedule schedule_for(const Request& request) const;

  Setting setting_;
  std::vector<Entry> entries_;
  std::vector<std::uint64_t> counts_;  // of the request being looked up
};

}  // namespace gradwire::exec
