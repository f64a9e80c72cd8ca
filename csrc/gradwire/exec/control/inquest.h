// Inquest: ranks were found to differ in their calls; who called what? Collects what the ranks say
// of their last calls and finds the first in which they differ.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/transport/control.h"

namespace gradwire::exec {

class Inquest {
 public:
  explicit Inquest(int size) : ranks_(static_cast<std::size_t>(size)) {}

  // Any frame that tells of a rank's calls.
  void hear(Rank from, const transport::ControlFrame& told);
  // Nothing more will come from this rank.
  void dismiss(Rank rank) { of(rank).dismissed = true; }
  bool is_over() const;

  // What this rank said in the value of its answer about that call.
  std::optional<std::uint64_t> value(std::uint32_t call, Rank rank) const;

  // "ranks disagree in call 7: ranks 0-1 called all_reduce(...); rank 2 called broadcast(...)";
  // empty where nothing that was told differs.
  std::string verdict() const;

 private:
  struct Testimony {
    std::uint32_t fingerprint = 0;
    std::uint64_t digest = 0;
    std::string call;
    std::optional<std::uint64_t> value{};  // of an answer
  };
  using Testimonies = std::map<Rank, Testimony>;
  struct Witness {
    std::uint32_t calls = 0;  // at least
    bool left = false;
    bool dismissed = false;
  };

  Witness& of(Rank rank) { return ranks_.at(static_cast<std::size_t>(rank)); }
  std::string on_call(std::uint32_t call, const Testimonies& testimonies) const;
  std::string on_ends() const;
  std::string others(std::uint32_t call, const Testimonies& testimonies) const;

  std::vector<Witness> ranks_;
  std::map<std::uint32_t, Testimonies> calls_;  // by number
};

// "rank 3", "ranks 0-2, 5"; ascending.
std::string name_ranks(const std::vector<Rank>& ranks);

}  // namespace gradwire::exec
