// BufferMap: the addresses of a request's arrays, and the copies before and after its schedule
// runs. It does not access this memory, which may be a device's.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "gradwire/exec/plan/plan.h"
#include "gradwire/exec/plan/request.h"

namespace gradwire::exec {

struct CopyStep {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
};

// Reused from call to call: make() allocates only when it needs more room than ever before.
class BufferMap {
 public:
  // Returns at least `bytes` bytes of memory, valid until the next make().
  using Scratch = std::function<std::byte*(std::size_t bytes)>;

  void make(const Request& request, const Plan& plan, const Scratch& scratch);

  const std::vector<std::byte*>& arrays() const noexcept { return arrays_; }
  // For a plan that folds: where this rank's inputs lie, end to end in its block, and the outputs.
  const std::vector<std::byte*>& addends() const noexcept { return addends_; }
  const std::vector<Array>& sums() const noexcept { return sums_; }
  const std::vector<CopyStep>& before() const noexcept { return before_; }
  const std::vector<CopyStep>& after() const noexcept { return after_; }

 private:
  void in_place(const Request& request, const Scratch& scratch);
  void fold(const Request& request, const Plan& plan, const Scratch& scratch);
  void reduce_scatter(const Request& request, const Plan& plan, const Scratch& scratch);
  void all_gather(const Request& request);
  void blocks(const Request& request);
  void all_to_all(const Request& request);
  void add_copy(std::vector<CopyStep>& steps, std::byte* to, const Array& from);
  std::size_t bytes_of(std::span<const Array> arrays) const;

  std::size_t element_ = 0;  // bytes per element
  std::vector<std::byte*> arrays_;
  std::vector<std::byte*> addends_;
  std::vector<Array> sums_;
  std::vector<CopyStep> before_, after_;
};

}  // namespace gradwire::exec
