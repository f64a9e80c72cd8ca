// Watch: what makes a call on a GPU end where a rank has died, was stopped, aborts, or makes
// another call, though a GPU's stream knows of none of this.
//
// Every call has a companion: a collective of nothing, with the call's text, on a communicator of
// CPUs that is nobody else's (the side). So each fault comes out of it as it does on CPUs, named
// after the same rank. A thread waits for the companions; when one fails, or the GPU does, it
// aborts the GPU's messages, which lets streams run out, and fails the side and the communicator
// that users hold.
//
// Replays of a CUDA graph have no companions, so a fault in one is found by NCCL, or not at all.
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

#include "gradwire/cuda/gpu_communicator.h"
#include "gradwire/exec/communicator.h"

namespace gradwire::cuda {

class Watch {
 public:
  // All must outlive it. Of the side nobody else makes calls.
  Watch(Communicator& gpu, exec::Communicator& side, exec::Communicator& users);
  // Waits for nobody. What is enqueued goes on.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // The call, watched. `timeout`: seconds from when the stream comes to it, for which it has as
  // long. Throws the failure as soon as there is one, and what Communicator::run() throws;
  // InvalidArgument for what is captured in a graph and was not made before.
  void run(const exec::Request& request, Feedback* feedback, Stream stream);
  void require_alive() const;
  // Waits until all calls so far are over, for so long; throws the failure, or Timeout.
  void finish(double timeout);
  // As exec::Communicator::abort().
  void abort(const std::string& reason) noexcept;

 private:
  struct Running {
    std::shared_ptr<exec::Work> companion;
    bool enqueued = false;
    std::unique_ptr<OwnedEvent> start, end;  // null: it is part of a graph
    bool has_started = false;                // as far as is known
    double timeout = 0;
    Deadline deadline = Deadline::never();  // once its turn has come
    std::string text;
  };

  void learn(const exec::Request& request, const std::string& text, const Feedback* feedback,
             bool captured);
  void begin(const exec::Request& request, std::string text);
  std::shared_ptr<exec::Work> submit_companion(const exec::Request& request,
                                               const std::string& text);
  void mark(std::unique_ptr<OwnedEvent> Running::* event, Stream stream);
  void finish_enqueuing();
  bool has_passed(const std::unique_ptr<OwnedEvent>& event) const;
  void require_in_time(Running& front) const;
  void loop(const std::stop_token& stop);
  void look(std::unique_lock<std::mutex>& lock);
  bool is_over(const Running& running) const;
  void check_messages();
  void check_flags();
  void fail(std::unique_lock<std::mutex>& lock, const std::exception_ptr& error) noexcept;

  Communicator& gpu_;
  exec::Communicator& side_;
  exec::Communicator& users_;
  std::mutex enqueuing_;  // of who uses the GPU's messages; taken before the other
  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Running> running_;
  std::vector<std::unique_ptr<OwnedEvent>> spare_;
  std::exception_ptr failure_;
  std::vector<exec::Array> nothing_;        // a block of none for each rank
  std::vector<std::uint64_t> counts_;       // of the call that is being made
  std::unordered_set<std::uint64_t> made_;  // digests of the calls so far
  std::jthread thread_;
};

}  // namespace gradwire::cuda
