// The communicator as Python holds it: the communicator itself, and the memory that its unfinished
// work reads or writes. In a process that was forked from the owner every call throws, and the
// destructor touches nothing that the two processes share.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/base/fork.h"
#include "gradwire/codec/codec.h"
#include "gradwire/exec/program/cpu_device.h"
#include "gradwire/gradwire.h"

namespace gradwire::bind {

namespace py = pybind11;

// Throws if Ctrl-C was pressed, to end a blocking call. Only the main thread sees it.
void check_signals();

// A request that owns what exec::Request only refers to. It can be run many times.
class OwnedRequest {
 public:
  using Addresses = std::vector<std::pair<std::uintptr_t, std::uint64_t>>;

  OwnedRequest(exec::Request fixed, std::string algorithm,
               std::shared_ptr<schedule::Schedule> schedule, const Addresses& inputs,
               const Addresses& outputs);

  // Set optional parts; see exec::Request.
  void feed_back(std::shared_ptr<codec::ErrorFeedback> feedback,
                 const std::vector<std::pair<std::string, std::size_t>>& keys);
  void shape(const std::vector<std::pair<std::size_t, std::size_t>>& shapes);
  void exchange(std::shared_ptr<exec::ExchangePayloads> payloads) {
    fixed_.payloads = std::move(payloads);
  }
  void label(std::string text) { label_ = std::move(text); }
  void move(std::string name) { moved_ = std::move(name); }
  void name(std::string text) { name_ = std::move(text); }
  void check_shape(const std::string& text, bool always);

  exec::Request view(double timeout) const;

 private:
  exec::Request fixed_;
  std::string algorithm_;
  std::shared_ptr<schedule::Schedule> schedule_;
  std::vector<exec::Array> inputs_, outputs_;
  std::vector<codec::KeyedArray> keys_;
  std::vector<exec::Shape> shapes_;
  std::string label_, moved_, shape_, name_;
};

class CommunicatorHandle {
 public:
  CommunicatorHandle(exec::Identity identity, exec::Tuning tuning);
  ~CommunicatorHandle();
  CommunicatorHandle(const CommunicatorHandle&) = delete;
  CommunicatorHandle& operator=(const CommunicatorHandle&) = delete;

  // Returns the communicator. Throws Aborted in a fork of the process that made it.
  exec::Communicator& get() const;
  void release_after_fork() noexcept { communicator_->release_after_fork(); }
  bool owned_here() const noexcept { return made_after_ == forks(); }

  // Keeps `memory` alive until `work` is over.
  std::shared_ptr<Work> keep(std::shared_ptr<Work> work, py::object memory);
  // Releases the memory of all work that is over.
  void forget_finished() { take_finished(); }

 private:
  using HeldMemory = std::vector<std::pair<std::shared_ptr<Work>, py::object>>;
  HeldMemory take_finished();

  const pid_t owner_ = ::getpid();
  const std::uint32_t made_after_ = forks();
  std::unique_ptr<exec::Communicator> communicator_;
  std::mutex mutex_;
  HeldMemory held_;
};

}  // namespace gradwire::bind
