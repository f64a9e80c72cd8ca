#include "gradwire/serve/shard/rounds.h"

#include <algorithm>
#include <utility>

namespace gradwire::serve {

void Rounds::join(std::uint64_t client) {
  members_[client] = {first_ ? Place::kExpected : Place::kNew};
}

void Rounds::leave(std::uint64_t client) { members_.erase(client); }

void Rounds::push(std::uint64_t client, float weight) {
  Member& member = members_[client];
  if (!std::exchange(member.pushed, true)) ++pushed_;
  member.place = Place::kExpected;
  weight_ += double{weight};
}

bool Rounds::has_quorum() const {
  const std::size_t clients = std::max<std::size_t>(members_.size(), 1);
  return weight_ > 0 && pushed_ >= std::min(limits_.quorum, clients);
}

bool Rounds::over() {
  if (!has_quorum()) {
    due_ = Deadline::never();
    return false;
  }
  if (due_.is_never()) due_ = Deadline::after(limits_.grace);
  const auto misses = [](const auto& each) {
    return each.second.place == Place::kExpected && !each.second.pushed;
  };
  return due_.passed() || std::ranges::none_of(members_, misses);
}

void Rounds::next() {
  for (auto& [client, member] : members_) {
    if (member.place == Place::kNew)
      member.place = Place::kExpected;
    else if (!member.pushed)
      member.place = Place::kLate;
    member.pushed = false;
  }
  first_ = false;
  pushed_ = 0;
  weight_ = 0;
  due_ = Deadline::never();
}

}  // namespace gradwire::serve
