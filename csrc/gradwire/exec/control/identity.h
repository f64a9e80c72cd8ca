// Identity: which rank this is, of which communicator, of which job.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/base/types.h"

namespace gradwire::exec {

// Returns "rank 3", for messages.
inline std::string name_of(Rank rank) { return "rank " + std::to_string(rank); }

struct Identity {
  Rank rank = 0;
  int size = 1;
  std::uint32_t communicator = 0;        // its number in the job, which every frame has
  std::vector<std::vector<Rank>> hosts;  // ranks of each host, for hierarchical schedules
  // For the status page, which people read.
  std::string job{};      // the job's name
  std::uint64_t tag = 0;  // distinguishes jobs of one name; the same on all ranks
  std::string about{};    // how its ranks were joined: interface, secret
  // The number in the job of each rank; empty: the same numbers.
  std::vector<Rank> job_ranks{};

  // Returns how many ranks are on this rank's host; all of them where hosts are not known.
  int ranks_on_host() const {
    for (const auto& host : hosts)
      if (std::ranges::find(host, rank) != host.end()) return static_cast<int>(host.size());
    return size;
  }
  // Converts a rank to its number in the job, and back: kNoPeer if it is no member.
  Rank job_rank(Rank member) const { return job_ranks.empty() ? member : job_ranks.at(at(member)); }
  Rank member(Rank job_rank) const {
    for (Rank each = 0; each < size; ++each)
      if (this->job_rank(each) == job_rank) return each;
    return kNoPeer;
  }
};

}  // namespace gradwire::exec
