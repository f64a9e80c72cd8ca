// GpuFaultMonitor: ends a call on a GPU when a rank has died, was stopped, aborts, or makes another
// call, which a GPU's stream would not notice.
//
// A thread compares the calls of all ranks in rounds on a communicator of CPUs that serves nothing
// else, the shadow communicator (call_comparison.h). So each fault is found as it is on CPUs, and
// names the same rank. When a comparison or the GPU fails, the thread aborts the GPU's messages, so
// that streams finish, and makes both the shadow communicator and the users' communicator fail.
//
// Replays of a CUDA graph are not compared, so a fault in one is found by NCCL, or by finish().
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "gradwire/base/wait_limit.h"
#include "gradwire/cuda/call_comparison.h"
#include "gradwire/cuda/call_thread.h"
#include "gradwire/cuda/gpu_communicator.h"
#include "gradwire/exec/communicator.h"

namespace gradwire::cuda {

class GpuFaultMonitor {
 public:
  static constexpr std::uint64_t kMostAhead = 4096;  // of another rank, in calls

  // All three must outlive it. Nobody else may make calls on `shadow`.
  GpuFaultMonitor(GpuCommunicator& gpu, exec::Communicator& shadow, exec::Communicator& users);
  // Does not wait: enqueued work goes on.
  ~GpuFaultMonitor();
  GpuFaultMonitor(const GpuFaultMonitor&) = delete;
  GpuFaultMonitor& operator=(const GpuFaultMonitor&) = delete;

  // Makes the call and monitors it; calls of several threads are made one after the other. Waits
  // while this rank is kMostAhead calls ahead of another. The stream has `timeout` seconds to reach
  // the call, and as many again for the call itself. Throws the failure as soon as there is one,
  // and what GpuCommunicator::run() throws; InvalidArgument for a call that is captured in a graph
  // and was not made before.
  void run(exec::Request request, GpuFeedback* feedback, Stream stream);
  void require_alive() const;
  // Throws the failure of the calls so far, whose streams the caller has waited for: only then are
  // their results of use. require_alive() may not know of it yet.
  void require_success();
  // Waits at most `timeout` seconds until this rank's calls so far are over; else throws Timeout or
  // the failure. Once calls were captured it also waits until the device has come to rest, since
  // nobody counts replays, and a Timeout is the failure of all ranks.
  void finish(double timeout);
  // Returns whether a rank had asked to stop (exec::Communicator::stop_requested(), of the users')
  // when it made one of the calls so far. Waits until all ranks have made this rank's calls; throws
  // the failure, and what the interrupt throws, which is called in each turn of the wait.
  bool should_stop(const WaitLimit::Interrupt& interrupt = nullptr);
  bool should_resize(const WaitLimit::Interrupt& interrupt = nullptr);  // the same
  // Aborts as exec::Communicator::abort() does.
  void abort(const std::string& reason) noexcept;

 private:
  struct Running {
    std::uint64_t number = 0;  // of this rank's calls
    bool enqueued = false;
    std::unique_ptr<OwnedEvent> start, end;  // null: the call is part of a graph
    bool has_started = false;                // as far as this rank knows
    double timeout = 0;
    Deadline deadline = Deadline::never();  // set once it is the oldest running call
    std::string text;
  };

  void require_made_before(const exec::Request& request, const std::string& text,
                           const GpuFeedback* feedback, bool captured);
  void begin(const exec::Request& request, std::string text, bool captured);
  std::unique_ptr<OwnedEvent> take_event();
  void enqueue(const CallStream& stream);
  void ask_device();
  void take_answer();
  bool is_made_by_all(const Running& running) const;
  void require_in_time(Running& front) const;
  void await_replays(std::unique_lock<std::mutex>& lock, const Deadline& deadline);
  void await_counts(std::unique_lock<std::mutex>& lock, const WaitLimit::Interrupt& interrupt);
  void loop(const std::stop_token& stop);
  void rest(std::unique_lock<std::mutex>& lock, const std::stop_token& stop);
  void check_running(std::unique_lock<std::mutex>& lock);
  void check_messages();
  void check_flags();
  [[noreturn]] void throw_root_cause();
  [[noreturn]] void fail_with_root_cause();
  void fail(std::unique_lock<std::mutex>& lock, const std::exception_ptr& error) noexcept;

  GpuCommunicator& gpu_;
  exec::Communicator& shadow_;
  exec::Communicator& users_;
  std::mutex calling_;    // one call at a time; taken first
  std::mutex enqueuing_;  // guards the GPU's messages; taken before mutex_
  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Running> running_;
  CallComparison comparison_;
  bool has_captured_ = false;
  int waiters_ = 0;  // threads that wait for the comparison of calls
  std::vector<std::unique_ptr<OwnedEvent>> spare_;
  std::exception_ptr failure_;
  std::vector<std::uint64_t> counts_;             // under calling_: of the call that is being made
  std::unordered_set<std::uint64_t> calls_made_;  // under calling_: digests of the calls so far
  // What the device was asked, by a thread of its own: a question may wait for a lock of the driver
  // that is free only once messages are aborted.
  struct EventQuery;
  std::shared_ptr<EventQuery> question_;  // null: none is under way
  CallThread asking_{"CUDA"};
  std::jthread thread_;
};

}  // namespace gradwire::cuda
