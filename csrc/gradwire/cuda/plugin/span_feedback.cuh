// A span's error feedback, on the device.
#pragma once

#include "gradwire/cuda/plugin/gpu.cuh"

namespace gradwire::cuda {

__host__ __device__ inline bool keeps_errors(const SpanFeedback& span_feedback) {
  return span_feedback.residual[0] != nullptr;
}

// Returns two[which]. (Indexing a kernel parameter would move it into local memory.)
__device__ inline float* one_of(float* const (&two)[2], std::uint32_t which) {
  return which == 0 ? two[0] : two[1];
}

// Return e and e' of a span; null where it keeps no errors.
__device__ inline const float* residual_of(const SpanFeedback& span_feedback) {
  return keeps_errors(span_feedback)
             ? one_of(span_feedback.residual, span_feedback.key_state->which)
             : nullptr;
}
__device__ inline float* next_residual(const SpanFeedback& span_feedback) {
  return keeps_errors(span_feedback)
             ? one_of(span_feedback.residual, 1 - span_feedback.key_state->which)
             : nullptr;
}

// e and e' of a span that keeps errors.
struct Residuals {
  const float* before;
  float* after;
};
__device__ inline Residuals feedback_of(const SpanFeedback& span_feedback) {
  const std::uint32_t which = span_feedback.key_state->which;
  return {one_of(span_feedback.residual, which), one_of(span_feedback.residual, 1 - which)};
}

}  // namespace gradwire::cuda
