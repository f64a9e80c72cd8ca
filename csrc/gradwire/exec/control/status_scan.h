// Finds the status pages of the ranks on this host through /proc. It opens only those of the same
// user, so that nobody can make a reader open something else.
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
  double seconds() const noexcept;  // for how long its activity has lasted
};

// Returns every rank whose process lives. Forks of a rank's process do not count.
std::vector<RankStatus> ranks_on_this_host();

// Describes what a rank does as seen from outside: "rank 3 (process 4242) is stopped".
std::string describe(const RankStatus& rank);

// Returns "all_reduce(float32[10], ...), call 12, round 1, segment 0"; empty outside of any
// operation.
std::string operation_of(const StatusPage& page);

}  // namespace gradwire::exec
