#include "gradwire/exec/control/mismatch_report.h"

#include <algorithm>
#include <utility>

namespace gradwire::exec {
namespace {

using transport::ControlFrame;
using transport::ControlType;

constexpr std::size_t kMostGroups = 4;

std::string count(std::uint32_t calls) {
  return std::to_string(calls) + (calls == 1 ? " call" : " calls");
}

// Groups of ranks that did the same, ordered by the first rank of each.
class Groups {
 public:
  void add(std::uint64_t key, Rank rank, const std::string& action) {
    auto at = std::find_if(all_.begin(), all_.end(),
                           [key](const Group& each) { return each.key == key; });
    if (at == all_.end()) at = all_.insert(at, {key, action, {}});
    at->ranks.push_back(rank);
  }
  bool differ() const { return all_.size() > 1; }
  // Returns "ranks 0-1 <action>; rank 2 <action>".
  std::string text() const {
    std::string text;
    for (std::size_t i = 0; i < std::min(all_.size(), kMostGroups); ++i)
      text += (i > 0 ? "; " : "") + name_ranks(all_[i].ranks) + " " + all_[i].action;
    if (all_.size() > kMostGroups)
      text += "; " + std::to_string(all_.size() - kMostGroups) + " other calls by the rest";
    return text;
  }
  // Returns "ranks 0-1 against rank 2".
  std::string sides() const {
    std::string text;
    for (const Group& each : all_)
      text += (text.empty() ? "" : " against ") + name_ranks(each.ranks);
    return text;
  }

 private:
  struct Group {
    std::uint64_t key;
    std::string action;
    std::vector<Rank> ranks;
  };
  std::vector<Group> all_;
};

}  // namespace

std::string name_ranks(const std::vector<Rank>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t first = 0, last = 0; first < ranks.size(); first = ++last) {
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (first > 0 ? ", " : "") + std::to_string(ranks[first]);
    if (last > first) text += (last > first + 1 ? "-" : ", ") + std::to_string(ranks[last]);
  }
  return text;
}

void MismatchReport::add(Rank from, const ControlFrame& frame) {
  RankRecord& rank = of(from);
  rank.closed |= frame.type == ControlType::kBye;
  rank.calls = std::max(rank.calls, frame.calls);
  if (frame.calls == 0) return;
  CallRecord& record = calls_[frame.calls - 1][from];
  const bool answers = frame.type == ControlType::kAnswer && (frame.flags & transport::kLast) == 0;
  const auto value = answers ? std::optional(frame.value) : record.value;
  record = {frame.fingerprint, frame.digest, text_of(frame), value};
}

std::optional<std::uint64_t> MismatchReport::value(std::uint32_t call, Rank rank) const {
  const auto about = calls_.find(call);
  if (about == calls_.end()) return std::nullopt;
  const auto said = about->second.find(rank);
  return said == about->second.end() ? std::nullopt : said->second.value;
}

bool MismatchReport::is_complete() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const RankRecord& each) { return each.done; });
}

std::string MismatchReport::summary() const {
  for (const auto& [call, records] : calls_) {
    const std::string text = difference_in_call(call, records);
    if (!text.empty()) return text;
  }
  return difference_in_number();
}

std::string MismatchReport::difference_in_call(std::uint32_t call,
                                               const CallRecords& records) const {
  Groups calls, histories;
  for (const auto& [rank, each] : records) {
    calls.add(each.fingerprint, rank, "called " + each.call);
    histories.add(each.digest, rank, "");
  }
  if (!histories.differ()) return {};
  const std::string number = "call " + std::to_string(call);
  if (calls.differ())
    return "ranks disagree in " + number + ": " + calls.text() + other_ranks(call, records);
  return "ranks disagree in a call before " + number + ", " + records.begin()->second.call +
         ", too long ago to say which: " + histories.sides();
}

// Returns a text about the ranks that have no record of the call in which others differ.
std::string MismatchReport::other_ranks(std::uint32_t call, const CallRecords& records) const {
  Groups groups;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const auto rank = static_cast<Rank>(i);
    const RankRecord& each = ranks_[i];
    if (records.contains(rank)) continue;
    if (each.closed)
      groups.add(each.calls + 2ULL, rank, "left after " + count(each.calls));
    else if (!each.done || each.calls > call)
      groups.add(0, rank, "did not say in time");
    else
      groups.add(1, rank, "had not come to it");
  }
  const std::string text = groups.text();
  return text.empty() ? text : "; " + text;
}

// Describes, for ranks that closed after different numbers of calls, the first call that only some
// made.
std::string MismatchReport::difference_in_number() const {
  std::uint32_t fewest = ~0U, most = 0;
  for (const RankRecord& each : ranks_) {
    if (!each.closed) continue;
    fewest = std::min(fewest, each.calls);
    most = std::max(most, each.calls);
  }
  if (fewest >= most) return {};
  Groups calls;
  const auto found = calls_.find(fewest);
  const CallRecords records = found == calls_.end() ? CallRecords() : found->second;
  for (const auto& [rank, each] : records) calls.add(each.fingerprint, rank, "called " + each.call);
  return "ranks disagree in call " + std::to_string(fewest) + ": " + calls.text() +
         other_ranks(fewest, records);
}

}  // namespace gradwire::exec
