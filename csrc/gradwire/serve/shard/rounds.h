// Rounds: which clients have pushed in the open round of a shard, and when it ends. A client that a
// round ended without is not waited for again until it pushes: what stands still delays others
// once.
//
// A push from values of an earlier round is late: it adds to the open round, which goes on as if it
// had not come, or late pushes would end rounds early, and so make others late. A client's second
// push of a round is in time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>

#include "gradwire/base/deadline.h"
#include "gradwire/serve/shard/update_rule.h"
#include "gradwire/serve/wire/message.h"

namespace gradwire::serve {

class Rounds {
 public:
  explicit Rounds(RoundLimits limits) : limits_(limits) {}

  // A client is waited for from the next round on; in the first round at once.
  void join(ClientId client);
  void leave(ClientId client);
  void push(ClientId client, float weight, bool late);

  // Returns the sum of the weights in the open round.
  float weight() const noexcept { return static_cast<float>(weight_); }
  // Returns whether the open round is over.
  bool over();
  // Returns whether enough have pushed in time: a quorum, or all that are waited for if they are
  // fewer.
  bool has_quorum() const;
  // Returns the time at which it is over without another push.
  Deadline due() const noexcept { return due_; }
  // Begins the next round.
  void next();

 private:
  enum class Place : std::uint8_t { kNew, kExpected, kLate };
  struct Member {
    Place place = Place::kNew;
    bool pushed = false;  // in this round
  };

  RoundLimits limits_;
  std::map<ClientId, Member> members_;
  bool first_ = true;
  std::set<std::uint64_t> in_time_;  // identities of who has pushed so, also if it has left since
  double weight_ = 0;
  Deadline due_ = Deadline::never();  // while none has
  bool in_grace_ = false;
};

}  // namespace gradwire::serve
