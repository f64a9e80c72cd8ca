// ProgressThread: one thread that drives a family of communicators (the groups of a mesh, those
// that split() makes) while no caller's thread drives them. It starts with the first communicator
// that needs it, and ends with the last. It gives a turn to each that has work, and sleeps on the
// doorbells of all of them.
//
// Any thread may call it; all but leave() also while it holds a task's mutex. The thread calls
// tasks without holding its own mutex.
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
#include "gradwire/base/spin.h"

namespace gradwire::exec {

class ProgressThread {
 public:
  enum class Turn { kMoved, kIdle, kOver, kFailed };

  // A communicator. The thread drives it from take_over() until a turn returns kOver or kFailed.
  class Task {
   public:
    // Returns whether there is work that nobody drives; then the thread drives it from now on.
    virtual bool take_over() = 0;
    // Moves what can move; never blocks for long. After kOver other threads may drive.
    virtual Turn turn() noexcept = 0;
    // Ends the work after kFailed; then other threads may drive. Blocks while it asks other ranks
    // for the cause, and so is called on a thread of its own.
    virtual void end_failed() noexcept = 0;
    // Returns after how many idle turns in a row other processes should get the core.
    virtual unsigned spins() const noexcept = 0;
    // Arms the doorbells and appends them; returns for how many milliseconds the thread may sleep,
    // or -1 if something has moved. after_sleep() follows.
    virtual int before_sleep(std::vector<pollfd>& doorbells) noexcept = 0;
    virtual void after_sleep() noexcept = 0;
    // Answers other ranks between calls; never blocks for long. Returns whether to be called again
    // a while later.
    virtual bool serve_between_calls() = 0;

   protected:
    ~Task() = default;
  };

  ProgressThread() = default;
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;
  ~ProgressThread() = default;  // all tasks have left

  // wake(): the task has work. serve(): call serve_between_calls() in 0.1 s, and every 0.25 s
  // while it asks for that; the thread wakes once for all tasks.
  void wake(Task& task);
  void serve(Task& task);
  // Returns when the thread no longer uses the task. Its work must be about to end.
  void leave(Task& task) noexcept;

 private:
  struct TaskState {
    bool is_due() const noexcept { return wanted && !used; }

    Task* task = nullptr;
    bool wanted = false;      // it may have work
    bool used = false;        // by the thread, which has released the mutex, or by the next one
    bool served = false;      // when serve_at_ has come
    Turn turn = Turn::kIdle;  // the last one
    std::jthread ending;      // runs end_failed()
  };
  using TaskStates = std::vector<std::shared_ptr<TaskState>>;

  std::shared_ptr<TaskState> entry_of(Task& task);
  void start();
  void call_thread();
  void stop_if_unused() noexcept;
  void loop(const std::stop_token& stop);
  void take_wanted(std::unique_lock<std::mutex>& lock, TaskStates& driven);
  void serve_due(std::unique_lock<std::mutex>& lock);
  void await_work(std::unique_lock<std::mutex>& lock, const std::stop_token& stop);
  void take_turns(std::unique_lock<std::mutex>& lock, TaskStates& driven, unsigned& idle);
  void sleep(const TaskStates& driven, const Deadline& until);
  void end_failed(std::unique_lock<std::mutex>& lock, TaskState& entry);
  void give_back(TaskState& entry);

  std::mutex life_;  // held where the thread begins or ends; taken before mutex_
  std::mutex mutex_;
  std::condition_variable changed_;  // for the thread: a task wants something
  std::condition_variable unused_;   // for those that leave
  TaskStates entries_;
  std::optional<Bell> bell_;  // wakes the thread where it sleeps on doorbells; of a thread
  bool turning_ = false;      // the thread takes turns, or sleeps on doorbells
  Deadline serve_at_ = Deadline::never();  // of all that are served
  std::vector<pollfd> doorbells_;
  Backoff backoff_;
  std::jthread thread_;
};

}  // namespace gradwire::exec
