// Family: the communicators of one process that a program uses together, such as the groups of a
// 2-D mesh. A rank that fails in one of them will not come to the calls of the others, so these
// fail too, with the same culprit. While a rank waits in one of them, its driver also answers those
// who ask in the others for whom it waits.
//
// Any thread may call it. Members may hold their own mutex only in set_wait() and
// awaited_by_others().
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "gradwire/exec/control/identity.h"
#include "gradwire/transport/control.h"

namespace gradwire::exec {

class Family {
 public:
  // A communicator of the family. An interface, since communicators are in a layer above.
  class Member {
   public:
    // Fails as communicator `there` of the same process did, unless it has ended. Never blocks for
    // long.
    virtual void fail_as(const transport::ControlFrame& failure,
                         const Identity& there) noexcept = 0;
    // Answers ranks that ask, unless a thread drives it, which does that. Never blocks. Returns
    // whether a rank has asked for the position.
    virtual bool serve() = 0;

   protected:
    ~Member() = default;
  };

  void join(Member& member);
  // Returns when no other thread uses the member any more.
  void leave(Member& member) noexcept;
  // Fails all members but one, which has this identity and has failed.
  void fail_others(const Member& failed, const Identity& identity,
                   const transport::ControlFrame& failure);

  // Sets for which rank of the job a member waits at the end of the chain; kNoPeer: none.
  void set_wait(const Member& member, Rank job_rank) noexcept;
  // Returns for which rank of the job another member waits; kNoPeer if none does.
  Rank awaited_by_others(const Member& member) const noexcept;
  // Serves all members but one. Returns whether a rank has asked for a position.
  bool serve_others(const Member& waiting);

 private:
  struct Entry {
    std::mutex in_use;
    Member* member = nullptr;  // null: it has left
    Rank waits_for = kNoPeer;  // guarded by mutex_
  };
  std::vector<std::shared_ptr<Entry>> entries() const;

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Entry>> entries_;
};

}  // namespace gradwire::exec
