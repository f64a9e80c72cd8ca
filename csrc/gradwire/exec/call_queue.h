// CallQueue: the collectives of a communicator that are not over, in the order of their calls, and
// the transfers that its driver has not seen. Guarded by the communicator's mutex, but for front().
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

// A collective that waits for its turn, or has its turn. It is reused with all that it has
// allocated.
struct Pending {
  Operation operation;                             // or the present phase of its program
  CpuDevice* program = nullptr;                    // null: one plan
  std::shared_ptr<codec::ErrorFeedback> feedback;  // outlives all transactions
  std::uint64_t shape_digest = 0;                  // of the ShapeCheck
  std::string shape;
  bool checks_shape = false;                      // ShapeCheck::always
  Submission submission;                          // of the observer's
  codec::ErrorFeedback::Transaction transaction;  // unused by programs, which have their own
  std::unique_ptr<CpuDevice> device;              // made for the first program

  void settle() noexcept;  // rolls residuals back unless the call's end has settled them
  std::shared_ptr<Work> work = std::make_shared<Work>();
  double timeout = 0;
  Deadline::Clock::time_point began;  // to run
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
  // Ends the front call, after which ranks have agreed on `requests` (FrameFlags).
  void pop(std::uint16_t requests);
  void fail(const std::exception_ptr& error) noexcept;

  std::vector<std::pair<Transfer, bool>> transfers;  // not yet seen by the driver; whether it sends
  // Calls, with the one in which ranks agreed to stop, or to resize.
  std::optional<std::uint64_t> stop_since, resize_since;

 private:
  std::vector<std::unique_ptr<Pending>> queue_;  // the front is executing
  std::atomic<Pending*> front_{nullptr};         // of the queue
  std::vector<std::unique_ptr<Pending>> spare_;
  std::uint64_t over_ = 0;
};

}  // namespace gradwire::exec
