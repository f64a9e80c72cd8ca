// Family: the communicators of one process that a program uses together, such as the groups of a
// 2-D mesh. A rank that fails in one of them will not come to the calls of the others, so these
// fail too, with the same culprit.
//
// Any thread may call it. A communicator calls it without its own mutex: the family's locks come
// first.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "gradwire/exec/control/identity.h"
#include "gradwire/transport/control.h"

namespace gradwire::exec {

class Family {
 public:
  // A communicator of the family.
  class Member {
   public:
    // Fails as communicator `there` of the same process did, unless it has ended. Never blocks for
    // long.
    virtual void fail_as(const transport::ControlFrame& failure,
                         const Identity& there) noexcept = 0;

   protected:
    ~Member() = default;
  };

  void join(Member& member);
  // Returns when no other thread uses the member any more.
  void leave(Member& member) noexcept;
  // Fails all members but one, which has this identity and has failed.
  void fail_others(const Member& failed, const Identity& identity,
                   const transport::ControlFrame& failure);

 private:
  struct Entry {
    std::mutex in_use;
    Member* member;  // null: it has left
  };
  std::vector<std::shared_ptr<Entry>> entries() const;

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Entry>> entries_;
};

}  // namespace gradwire::exec
