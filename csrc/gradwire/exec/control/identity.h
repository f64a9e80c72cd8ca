// Identity: which rank this is, of which communicator, of which job.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gradwire/base/types.h"

namespace gradwire::exec {

struct Identity {
  Rank rank = 0;
  int size = 1;
  std::uint32_t communicator = 0;        // its number in the job, which every frame has
  std::vector<std::vector<Rank>> hosts;  // ranks of each host, for hierarchical schedules
  // For the status page, which people read.
  std::string job{};      // the job's name
  std::uint64_t tag = 0;  // distinguishes jobs of one name; the same on all ranks
  std::string about{};    // how its ranks were joined: interface, secret
};

}  // namespace gradwire::exec
