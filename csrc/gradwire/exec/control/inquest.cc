#include "gradwire/exec/control/inquest.h"

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

// What ranks did alike, in the order of the first of each group.
class Groups {
 public:
  void add(std::uint64_t key, Rank rank, const std::string& deed) {
    auto at = std::find_if(all_.begin(), all_.end(),
                           [key](const Group& each) { return each.key == key; });
    if (at == all_.end()) at = all_.insert(at, {key, deed, {}});
    at->ranks.push_back(rank);
  }
  bool differ() const { return all_.size() > 1; }
  // "ranks 0-1 <deed>; rank 2 <deed>".
  std::string text() const {
    std::string text;
    for (std::size_t i = 0; i < std::min(all_.size(), kMostGroups); ++i)
      text += (i > 0 ? "; " : "") + name_ranks(all_[i].ranks) + " " + all_[i].deed;
    if (all_.size() > kMostGroups)
      text += "; " + std::to_string(all_.size() - kMostGroups) + " other calls by the rest";
    return text;
  }
  // "ranks 0-1 against rank 2".
  std::string sides() const {
    std::string text;
    for (const Group& each : all_)
      text += (text.empty() ? "" : " against ") + name_ranks(each.ranks);
    return text;
  }

 private:
  struct Group {
    std::uint64_t key;
    std::string deed;
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

void Inquest::hear(Rank from, const ControlFrame& told) {
  Witness& witness = of(from);
  witness.left |= told.type == ControlType::kBye;
  witness.calls = std::max(witness.calls, told.calls);
  if (told.calls == 0) return;
  Testimony& testimony = calls_[told.calls - 1][from];
  const bool answers = told.type == ControlType::kAnswer && (told.flags & transport::kLast) == 0;
  const auto value = answers ? std::optional(told.value) : testimony.value;
  testimony = {told.fingerprint, told.digest, text_of(told), value};
}

std::optional<std::uint64_t> Inquest::value(std::uint32_t call, Rank rank) const {
  const auto about = calls_.find(call);
  if (about == calls_.end()) return std::nullopt;
  const auto said = about->second.find(rank);
  return said == about->second.end() ? std::nullopt : said->second.value;
}

bool Inquest::is_over() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const Witness& each) { return each.dismissed; });
}

std::string Inquest::verdict() const {
  for (const auto& [call, testimonies] : calls_) {
    const std::string text = on_call(call, testimonies);
    if (!text.empty()) return text;
  }
  return on_ends();
}

std::string Inquest::on_call(std::uint32_t call, const Testimonies& testimonies) const {
  Groups calls, pasts;
  for (const auto& [rank, each] : testimonies) {
    calls.add(each.fingerprint, rank, "called " + each.call);
    pasts.add(each.digest, rank, "");
  }
  if (!pasts.differ()) return {};
  const std::string number = "call " + std::to_string(call);
  if (calls.differ())
    return "ranks disagree in " + number + ": " + calls.text() + others(call, testimonies);
  return "ranks disagree in a call before " + number + ", " + testimonies.begin()->second.call +
         ", too long ago to say which: " + pasts.sides();
}

// Those who said nothing of the call in which others differ.
std::string Inquest::others(std::uint32_t call, const Testimonies& testimonies) const {
  Groups rest;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const auto rank = static_cast<Rank>(i);
    const Witness& each = ranks_[i];
    if (testimonies.contains(rank)) continue;
    if (each.left)
      rest.add(each.calls + 2ULL, rank, "left after " + count(each.calls));
    else if (!each.dismissed || each.calls > call)
      rest.add(0, rank, "did not say in time");
    else
      rest.add(1, rank, "had not come to it");
  }
  const std::string text = rest.text();
  return text.empty() ? text : "; " + text;
}

// Ranks that left after different numbers of calls: the first that only some of them made.
std::string Inquest::on_ends() const {
  std::uint32_t fewest = ~0U, most = 0;
  for (const Witness& each : ranks_) {
    if (!each.left) continue;
    fewest = std::min(fewest, each.calls);
    most = std::max(most, each.calls);
  }
  if (fewest >= most) return {};
  Groups calls;
  const auto found = calls_.find(fewest);
  const Testimonies testimonies = found == calls_.end() ? Testimonies() : found->second;
  for (const auto& [rank, each] : testimonies)
    calls.add(each.fingerprint, rank, "called " + each.call);
  return "ranks disagree in call " + std::to_string(fewest) + ": " + calls.text() +
         others(fewest, testimonies);
}

}  // namespace gradwire::exec
