#include "gradwire/serve/shard/rounds.h"

#include <algorithm>
#include <utility>

namespace gradwire::serve {

void Rounds::join(ClientId client) { members_[client] = {first_ ? Place::kExpected : Place::kNew}; }

void Rounds::leave(ClientId client) { members_.erase(client); }

void Rounds::push(ClientId client, float weight, bool late) {
  Member& member = members_[client];
  const bool again = std::exchange(member.pushed, true);
  if (again || !late) {
    if (in_time_.empty()) due_ = Deadline::after(limits_.patience);
    in_time_.insert(identity_of(client));
  }
  member.place = Place::kExpected;
  weight_ += double{weight};
}

bool Rounds::has_quorum() const {
  const auto expected = std::ranges::count_if(
      members_, [](const auto& each) { return each.second.place == Place::kExpected; });
  const auto most = static_cast<std::size_t>(std::max<std::ptrdiff_t>(expected, 1));
  return in_time_.size() >= std::min(limits_.quorum, most);
}

bool Rounds::over() {
  if (in_time_.empty()) return false;
  if (!in_grace_ && has_quorum()) {
    in_grace_ = true;
    due_ = Deadline::after(limits_.grace);
  }
  return due_.passed() || std::ranges::all_of(members_, [this](const auto& each) {
           return each.second.place != Place::kExpected ||
                  in_time_.contains(identity_of(each.first));
         });
}

void Rounds::next() {
  for (auto& [client, member] : members_) {
    if (member.place == Place::kNew)
      member.place = Place::kExpected;
    else if (!member.pushed)
      member.place = Place::kLate;
    member.pushed = false;
  }
  first_ = in_grace_ = false;
  in_time_.clear();
  weight_ = 0;
  due_ = Deadline::never();
}

}  // namespace gradwire::serve
