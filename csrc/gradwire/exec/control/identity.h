// Identity: which rank of which communicator of which job this is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gradwire/base/types.h"

namespace gradwire::exec {

struct Identity {
  Rank rank = 0;
  int size = 1;
  std::uint32_t communicator = 0;        // number in the job, in every frame
  std::vector<std::vector<Rank>> hosts;  // ranks of each host, for hierarchical schedules
  // For people, on the status page.
  std::string job{};      // its name
  std::uint64_t tag = 0;  // tells jobs of one name apart; the same on all ranks
  std::string about{};    // what its ranks joined by: interface, secret
};

}  // namespace gradwire::exec
