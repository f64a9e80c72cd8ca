// Fibers: the threads of a block, of which one runs at a time, in one host thread.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace simulated {

// Runs `body` once for each of `count` fibers; pick(ready) says which of those that can
// run is next, by its place.
void run_fibers(unsigned count, const std::function<void(unsigned)>& body,
                const std::function<std::size_t(const std::vector<unsigned>&)>& pick);
// For a fiber that runs: lets others run until resume_all(list) has been called for it.
unsigned current_fiber();
void suspend();
void resume(unsigned fiber);
unsigned fibers_alive();

[[noreturn]] void fatal(const char* what);

}  // namespace simulated
