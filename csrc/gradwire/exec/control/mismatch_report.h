// MismatchReport: the text that says who called what, when ranks have made different calls. It
// collects the ranks' records of their last calls and finds the first call in which they differ.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/transport/control.h"

namespace gradwire::exec {

class MismatchReport {
 public:
  explicit MismatchReport(int size) : ranks_(at(size)) {}

  // Adds a message of any kind that describes a rank's calls.
  void add(Rank from, const transport::ControlFrame& frame);
  // Notes that no more messages will come from this rank.
  void mark_final(Rank rank) { of(rank).done = true; }
  // Returns whether all ranks are marked so.
  bool is_complete() const;

  // Returns the value field of the rank's answer about that call, if it has answered.
  std::optional<std::uint64_t> value(std::uint32_t call, Rank rank) const;

  // Returns "ranks disagree in call 7: ranks 0-1 called all_reduce(...); rank 2 called
  // broadcast(...)"; empty if no record differs.
  std::string summary() const;

 private:
  struct CallRecord {
    std::uint32_t fingerprint = 0;
    std::uint64_t digest = 0;
    std::string call;
    std::optional<std::uint64_t> value{};  // of an answer
  };
  using CallRecords = std::map<Rank, CallRecord>;
  struct RankRecord {
    std::uint32_t calls = 0;  // at least so many
    bool closed = false;
    bool done = false;
  };

  RankRecord& of(Rank rank) { return ranks_.at(at(rank)); }
  std::string difference_in_call(std::uint32_t call, const CallRecords& records) const;
  std::string difference_in_number() const;
  std::string other_ranks(std::uint32_t call, const CallRecords& records) const;

  std::vector<RankRecord> ranks_;
  std::map<std::uint32_t, CallRecords> calls_;  // by number
};

// Returns "rank 3" or "ranks 0-2, 5", in ascending order.
std::string name_ranks(const std::vector<Rank>& ranks);

}  // namespace gradwire::exec
