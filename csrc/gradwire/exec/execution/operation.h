// Operation: a request bound to a plan and to addresses, with the local work before and after it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "gradwire/codec/feedback/feedback.h"
#include "gradwire/exec/execution/execution.h"
#include "gradwire/exec/execution/feedback_view.h"
#include "gradwire/exec/plan/buffer_map.h"
#include "gradwire/exec/plan/plan.h"
#include "gradwire/exec/plan/request.h"

namespace gradwire::exec {

// Reused from call to call: bind() allocates only when it needs more room than ever before.
class Operation {
 public:
  // `transaction` must be open for the request's keys if it feeds back. The caller ends it.
  void bind(const Request& request, std::shared_ptr<const Plan> plan,
            codec::ErrorFeedback::Transaction& transaction);

  // Do the local work before the first frame and after the last: copies, sums of gathered arrays,
  // and the codec's adaptation. end() takes Execution::finite(), and returns whether residuals may
  // change.
  void begin();
  bool end(bool finite);
  Execution::Call call() const;
  const Plan& plan() const noexcept { return *plan_; }
  const std::shared_ptr<const Plan>& shared_plan() const noexcept { return plan_; }

 private:
  static void copy(const std::vector<CopyStep>& steps);
  void deliver_residuals() const;
  void fold() const;
  bool all_finite() const;
  const std::vector<std::byte*>& arrays() const { return buffer_map_.arrays(); }
  float* floats(std::size_t array) const { return reinterpret_cast<float*>(arrays()[array]); }

  std::shared_ptr<const Plan> plan_;
  BufferMap buffer_map_;
  std::vector<std::byte> scratch_;
  FeedbackView feedback_;
};

}  // namespace gradwire::exec
