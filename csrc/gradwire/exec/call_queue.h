// CallQueue: a communicator's collectives that are not over, in the order of their calls, and the
// transfers (send, recv) that its driver has not taken yet. The communicator's mutex guards it;
// only front() may be called without.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/base/deadline.h"
#include "gradwire/base/work.h"
#include "gradwire/exec/control/observer.h"
#include "gradwire/exec/execution/operation.h"
#include "gradwire/exec/execution/point_to_point.h"
#include "gradwire/exec/program/cpu_device.h"

namespace gradwire::exec {

// A collective in the queue. It is reused by later calls, with the memory that it has allocated.
struct Pending {
  Operation operation;                             // with a program: its present phase
  CpuDevice* program = nullptr;                    // null: the call is one plan
  std::shared_ptr<codec::ErrorFeedback> feedback;  // outlives all transactions
  std::uint64_t shape_digest = 0;                  // of the ShapeCheck
  std::string shape;
  bool checks_shape = false;                      // ShapeCheck::always
  Submission submission;                          // what the observer returned
  codec::ErrorFeedback::Transaction transaction;  // unused by programs, which have their own
  std::unique_ptr<CpuDevice> device;              // made for the first program

  void roll_back() noexcept;  // undoes what the call did to residuals, if it has not ended
  std::shared_ptr<Work> work = std::make_shared<Work>();
  double timeout = 0;
  Deadline::Clock::time_point began;  // when its turn came
  Deadline deadline = Deadline::never();
};

class CallQueue {
 public:
  bool empty() const noexcept { return queue_.empty(); }
  std::size_t size() const noexcept { return queue_.size(); }
  // Returns the call whose turn it is; null if there is none. Any thread may ask.
  Pending* front() const noexcept { return front_; }
  const Pending& last() const { return *queue_.back(); }
  auto begin() const noexcept { return queue_.begin(); }
  auto end() const noexcept { return queue_.end(); }
  // Returns the number of calls that are over.
  std::uint64_t over() const noexcept { return over_; }

  std::unique_ptr<Pending> take_spare();
  std::shared_ptr<Work> push(std::unique_ptr<Pending> pending);
  // Ends the front call. `requests`: the FrameFlags on which all ranks have agreed by then.
  void pop(std::uint16_t requests);
  void fail(const std::exception_ptr& error) noexcept;

  std::vector<std::pair<Transfer, bool>> transfers;  // not yet taken; true: a send
  // The number of calls that were over when ranks had agreed to stop, or to resize.
  std::optional<std::uint64_t> stop_since, resize_since;

 private:
  std::vector<std::unique_ptr<Pending>> queue_;  // the front is executing
  std::atomic<Pending*> front_{nullptr};         // of the queue
  std::vector<std::unique_ptr<Pending>> spare_;
  std::uint64_t over_ = 0;
};

}  // namespace gradwire::exec
