// Finds the status pages of the ranks on this host, by way of /proc: those of the same user only,
// so that nothing is opened that its owner has put there for another to open.
#pragma once

#include <string>
#include <vector>

#include "gradwire/exec/control/status.h"

namespace gradwire::exec {

struct RankStatus {
  int pid = 0;       // in this process's namespace
  char state = '?';  // as in /proc/PID/stat: R, S, D, T (stopped), t (traced)
  StatusPage page{};

  bool stopped() const noexcept { return state == 'T'; }
  double seconds() const noexcept;  // for how long it has done what it does
};

// Every rank whose process lives; forks of a rank's process are none.
std::vector<RankStatus> ranks_on_this_host();

// "rank 3 (process 4242) is stopped": what it does, as seen from outside.
std::string describe(const RankStatus& rank);

// "all_reduce(float32[10], ...), call 12, round 1, segment 0"; empty outside of any.
std::string operation_of(const StatusPage& page);

}  // namespace gradwire::exec
