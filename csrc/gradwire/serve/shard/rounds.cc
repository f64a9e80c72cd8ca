#include "gradwire/serve/shard/rounds.h"

#include <algorithm>
#include <utility>

namespace gradwire::serve {

void Rounds::join(std::uint64_t client) {
  members_[client] = {first_ ? Place::kExpected : Place::kNew};
}

void Rounds::leave(std::uint64_t client) { members_.erase(client); }

void Rounds::push(std::uint64_t client, float weight, bool late) {
  Member& member = members_[client];
  const bool again = std::exchange(member.pushed, true);
  if ((again || !late) && !std::exchange(member.in_time, true)) ++in_time_;
  member.place = Place::kExpected;
  weight_ += double{weight};
}

bool Rounds::has_quorum() const {
  const std::size_t clients = std::max<std::size_t>(members_.size(), 1);
  return in_time_ >= std::min(limits_.quorum, clients);
}

bool Rounds::over() {
  if (weight_ <= 0 || !has_quorum()) {
    due_ = Deadline::never();
    return false;
  }
  if (due_.is_never()) due_ = Deadline::after(limits_.grace);
  return due_.passed() || std::ranges::all_of(members_, [](const auto& each) {
           return each.second.place != Place::kExpected || each.second.in_time;
         });
}

void Rounds::next() {
  for (auto& [client, member] : members_) {
    if (member.place == Place::kNew)
      member.place = Place::kExpected;
    else if (!member.pushed)
      member.place = Place::kLate;
    member.pushed = member.in_time = false;
  }
  first_ = false;
  in_time_ = 0;
  weight_ = 0;
  due_ = Deadline::never();
}

}  // namespace gradwire::serve
