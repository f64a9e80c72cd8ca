// Fibers: the threads of a block, of which one runs at a time, in one host thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace simulated {

// The fibers of one block. Crews are never destroyed, but taken again.
struct Crew;
// Returns one of `count` fibers, each of which is to run `body` once.
Crew& take_crew(unsigned count, std::function<void(unsigned)> body);
void give_back(Crew& crew);

// Runs a crew's fibers; pick(ready) says which of those that can run is next, by its place. Returns
// false where all that are left have paused, and true when all have ended.
bool run_fibers(Crew& crew, const std::function<std::size_t(const std::vector<unsigned>&)>& pick);
// Returns how often its fibers have ended or have been suspended so far.
std::uint64_t events(const Crew& crew);

// For a fiber that runs: lets others run until resume(fiber) has been called for it.
unsigned current_fiber();
void suspend();
void resume(unsigned fiber);
// Lets others run, those of other crews as well.
void pause_fiber();

[[noreturn]] void fatal(const char* what);

}  // namespace simulated
