// A run's error feedback, on the device.
#pragma once

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

__host__ __device__ inline bool keeps_errors(const RunFeedback& run_feedback) {
  return run_feedback.residual[0] != nullptr;
}

// Returns two[which]. (Indexing a kernel parameter would move it into local memory.)
__device__ inline float* one_of(float* const (&two)[2], std::uint32_t which) {
  return which == 0 ? two[0] : two[1];
}

// Return e and e' of a run; null where it keeps no errors.
__device__ inline const float* residual_of(const RunFeedback& run_feedback) {
  return keeps_errors(run_feedback) ? one_of(run_feedback.residual, run_feedback.key_state->which)
                                    : nullptr;
}
__device__ inline float* next_residual(const RunFeedback& run_feedback) {
  return keeps_errors(run_feedback)
             ? one_of(run_feedback.residual, 1 - run_feedback.key_state->which)
             : nullptr;
}

// e and e' of a run that keeps errors.
struct Feedback {
  const float* before;
  float* after;
};
__device__ inline Feedback feedback_of(const RunFeedback& run_feedback) {
  const std::uint32_t which = run_feedback.key_state->which;
  return {one_of(run_feedback.residual, which), one_of(run_feedback.residual, 1 - which)};
}

}  // namespace gradwire::cuda
