// The method by which a call is carried out, decided in one place for CPUs and GPUs. All ranks
// decide alike, since it depends only on what they have in common.
#pragma once

#include <cstdint>
#include <string_view>

#include "gradwire/exec/plan/request.h"

namespace gradwire::exec {

enum class Method : std::uint8_t {
  kPlan,      // a schedule
  kNative,    // collectives of the library between GPUs
  kGather,    // payloads, encoded once, are gathered and added
  kLowRank,   // two all_reduces of factors
  kExchange,  // payloads are gathered; the caller encodes and decodes
};

// What the method depends on besides the request. The defaults are for calls on CPUs.
struct GpuLinks {
  bool are_used = false;          // the call is on GPUs
  bool have_collectives = false;  // the library between them has its own
  bool one_level = false;         // one GPU on each host, or one host
  std::string_view name;          // of what carries their messages, for errors
};

struct Decision {
  Method method = Method::kPlan;
  std::string_view algorithm;  // of the plan or, for payloads, of their all_gather

  bool operator==(const Decision&) const = default;
};

// Returns whether an algorithm gathers payloads, or plain arrays, and lets every rank add them up:
// "gather", or "gather(ring)" with the algorithm of the all_gather.
bool is_gather(std::string_view algorithm);
// Returns "ring" of "gather(ring)", or "auto".
std::string_view gather_algorithm(std::string_view algorithm);

// Decides the method of a call, with or without error feedback. Throws InvalidArgument or
// ScheduleError if the request is not possible; for kPlan, PlanCache::find() may throw these, too.
Decision decide(const Request& request, bool feeds_back, const GpuLinks& links = {});

}  // namespace gradwire::exec
