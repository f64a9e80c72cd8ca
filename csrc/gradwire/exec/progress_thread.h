// ProgressThread: the one thread that drives a family's communicators while no caller's thread
// does, as the groups of a mesh and those that split() makes. It starts with the first communicator
// that needs it, and ends with the last. It takes turns with all that have work, and sleeps on the
// doorbells of all of them.
//
// Any thread may call it, also under a member's own mutex, but for leave(). Its thread calls
// members without its mutex.
#pragma once

#include <poll.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "gradwire/base/bell.h"
#include "gradwire/base/deadline.h"

namespace gradwire::exec {

class ProgressThread {
 public:
  enum class Turn { kMoved, kIdle, kOver, kFailed };

  // What the thread asks of a communicator. It drives it from take_over() to the turn that is over.
  class Member {
   public:
    // Returns whether there is work that nobody drives, which the thread drives from now on.
    virtual bool take_over() = 0;
    // Moves what can move; never blocks for long. After the one that is over others may drive.
    virtual Turn turn() noexcept = 0;
    // Ends the work after the turn that failed; others may drive then. Blocks while it asks other
    // ranks for the cause, and so is called on a thread that does nothing else.
    virtual void end_failed() noexcept = 0;
    // How many turns in a row may be idle before other processes should get the core.
    virtual unsigned spins() const noexcept = 0;
    // Arms the doorbells and adds them; returns for how many milliseconds the thread may sleep, or
    // -1 where something has moved. Each is followed by after_sleep().
    virtual int before_sleep(std::vector<pollfd>& doorbells) noexcept = 0;
    virtual void after_sleep() noexcept = 0;
    // Does what is to be done between calls, and never blocks for long. Returns whether to call it
    // again a while later.
    virtual bool serve_between_calls() = 0;

   protected:
    ~Member() = default;
  };

  ProgressThread() = default;
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;
  ~ProgressThread() = default;  // all members have left

  // Has the thread look after a member that has work; or, a tenth of a second later, between its
  // calls. However many members it serves again and again, it wakes for that four times a second.
  void wake(Member& member);
  void serve(Member& member);
  // Returns when the thread no longer uses the member, whose work must be about to end.
  void leave(Member& member) noexcept;

 private:
  struct Entry {
    bool is_due() const noexcept { return wanted && !used; }

    Member* member = nullptr;
    bool wanted = false;      // it may have work
    bool used = false;        // by the thread, which has released the mutex, or by the next one
    bool served = false;      // when serve_at_ has come
    Turn turn = Turn::kIdle;  // the last one
    std::jthread ending;      // runs end_failed()
  };
  using Entries = std::vector<std::shared_ptr<Entry>>;

  std::shared_ptr<Entry> entry_of(Member& member);
  void start();
  void call_thread();
  void stop_if_unused() noexcept;
  void loop(const std::stop_token& stop);
  void take_wanted(std::unique_lock<std::mutex>& lock, Entries& driven);
  void serve_due(std::unique_lock<std::mutex>& lock);
  void await_work(std::unique_lock<std::mutex>& lock, const std::stop_token& stop);
  void take_turns(std::unique_lock<std::mutex>& lock, Entries& driven, unsigned& idle);
  void sleep(const Entries& driven, const Deadline& until);
  void end_failed(std::unique_lock<std::mutex>& lock, Entry& entry);
  void give_back(Entry& entry);

  std::mutex life_;  // held where the thread begins or ends; taken before mutex_
  std::mutex mutex_;
  std::condition_variable changed_;  // for the thread: a member wants something
  std::condition_variable unused_;   // for those that leave
  Entries entries_;
  std::optional<Bell> bell_;  // wakes the thread where it sleeps on doorbells; of a thread
  bool turning_ = false;      // the thread takes turns, or sleeps on doorbells
  Deadline serve_at_ = Deadline::never();  // of all that are served
  std::vector<pollfd> doorbells_;
  std::jthread thread_;
};

}  // namespace gradwire::exec
