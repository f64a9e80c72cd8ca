// The rules of a well-formed schedule, whether it is correct or not. The builder, the parser and
// the verifier apply the same rules.
#pragma once

#include <string>
#include <string_view>

#include "gradwire/schedule/schedule.h"

namespace gradwire::schedule {

inline constexpr int kMaxRanks = 1 << 15;
inline constexpr int kMaxChunks = 1 << 20;  // as many as all_to_all of 1024 ranks has
inline constexpr int kMaxRounds = 1 << 16;  // a frame header has 16 bits for the round
inline constexpr std::size_t kMaxName = 200;

// Returns whether the collective has a root (reduce, broadcast, gather, scatter).
bool rooted(Collective collective) noexcept;

// Returns how many chunks the collective is cut into; 0 when any number will do.
int required_chunks(Collective collective, int ranks) noexcept;

// Each returns what is wrong, as a sentence without a full stop; empty when nothing is wrong.
std::string fault_in_size(int ranks, int chunks);
std::string fault_in_name(std::string_view name);
std::string fault_in_roles(const Schedule& schedule);  // collective, chunks and root fit together
std::string fault_in_edge(const Schedule& schedule, int round, const Edge& edge);

// Throws ScheduleError(prefix + fault) unless the fault is empty.
void require_no_fault(const std::string& fault, const std::string& prefix = "");

// Returns "chunk 3" or "chunks 0:4".
std::string to_string(ChunkRange chunks);

}  // namespace gradwire::schedule
