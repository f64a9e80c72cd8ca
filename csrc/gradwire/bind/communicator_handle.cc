#include "gradwire/bind/communicator_handle.h"

#include <algorithm>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"
#include "gradwire/bind/module.h"

namespace gradwire::bind {
namespace {

std::vector<exec::Array> arrays(const OwnedRequest::Addresses& addresses) {
  std::vector<exec::Array> out;
  out.reserve(addresses.size());
  for (const auto& [address, count] : addresses)
    out.push_back({reinterpret_cast<std::byte*>(address), count});
  return out;
}

}  // namespace

void check_signals() {
  py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

OwnedRequest::OwnedRequest(exec::Request fixed, std::string algorithm,
                           std::shared_ptr<schedule::Schedule> schedule, const Addresses& inputs,
                           const Addresses& outputs)
    : fixed_(std::move(fixed)),
      algorithm_(std::move(algorithm)),
      schedule_(std::move(schedule)),
      inputs_(arrays(inputs)),
      outputs_(arrays(outputs)) {
  if (schedule_) fixed_.schedule_digest = schedule::digest(*schedule_);
}

void OwnedRequest::feed_back(std::shared_ptr<codec::ErrorFeedback> feedback,
                             const std::vector<std::pair<std::string, std::size_t>>& keys) {
  fixed_.feedback = std::move(feedback);
  for (const auto& [key, count] : keys) keys_.push_back({key, count});
}

void OwnedRequest::shape(const std::vector<std::pair<std::size_t, std::size_t>>& shapes) {
  for (const auto& [rows, columns] : shapes) shapes_.push_back({rows, columns});
}

void OwnedRequest::check_shape(const std::string& text, bool always) {
  constexpr std::size_t kMostText = 160;
  fixed_.shape_check = {Fnv1a().text(text).digest(), {}, always};
  shape_ = text.size() <= kMostText ? text : text.substr(0, kMostText) + " ...";
}

exec::Request OwnedRequest::view(double timeout) const {
  exec::Request out = fixed_;
  out.algorithm = algorithm_;
  out.schedule = schedule_.get();
  out.inputs = inputs_;
  out.outputs = outputs_;
  out.keys = keys_;
  out.shapes = shapes_;
  out.codec_label = label_;
  out.moved = moved_;
  out.trace_name = name_;
  out.shape_check.text = shape_;
  out.timeout = timeout;
  return out;
}

CommunicatorHandle::CommunicatorHandle(exec::Identity identity, exec::Tuning tuning)
    : communicator_(std::make_unique<exec::Communicator>(std::move(identity), tuning)) {}

// Closes the communicator, since without a goodbye the other ranks would take a dropped
// communicator for a failed one. The memory of unfinished work is released after the threads that
// use it have ended.
CommunicatorHandle::~CommunicatorHandle() {
  if (!owned_here()) {
    [[maybe_unused]] exec::Communicator* leaked = communicator_.release();
    return;
  }
  const Unlocked unlocked;
  try {
    communicator_->close(0);
  } catch (const Error&) {  // whoever made a call knows of the failure
  }
  communicator_.reset();
}

exec::Communicator& CommunicatorHandle::get() const {
  if (owned_here()) return *communicator_;
  throw Aborted("this communicator belongs to process " + std::to_string(owner_) +
                ", of which this one (" + std::to_string(::getpid()) +
                ") is a fork: make a communicator of its own here, after the fork");
}

std::shared_ptr<Work> CommunicatorHandle::keep(std::shared_ptr<Work> work, py::object memory) {
  const HeldMemory finished = take_finished();
  std::lock_guard lock(mutex_);
  held_.emplace_back(work, std::move(memory));
  return work;
}

// Returns the memory of work that is over. It must be destroyed without the mutex, since a
// destructor may run any Python code.
CommunicatorHandle::HeldMemory CommunicatorHandle::take_finished() {
  HeldMemory finished;
  std::lock_guard lock(mutex_);
  const auto over = std::partition(held_.begin(), held_.end(),
                                   [](const auto& each) { return !each.first->done(); });
  finished.assign(std::make_move_iterator(over), std::make_move_iterator(held_.end()));
  held_.erase(over, held_.end());
  return finished;
}

}  // namespace gradwire::bind
