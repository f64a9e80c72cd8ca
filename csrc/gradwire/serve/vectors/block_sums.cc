// Compiled without fused operations, and in loops that every compiler may vectorise without another
// order of the operations.
#include "gradwire/serve/vectors/block_sums.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace gradwire::serve {
namespace {

constexpr std::uint64_t kFewestBlocks = 1024;
constexpr std::size_t kLanes = 16;

// Adds term(i) to lane i % kLanes, then adds the lanes pairwise.
template <typename Term>
double sum_in_lanes(std::size_t n, Term term) noexcept {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  for (std::size_t lane = 0; i < n; ++i, ++lane) lanes[lane] += term(i);
  for (std::size_t half = kLanes / 2; half > 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

}  // namespace

std::size_t block_of(std::uint64_t elements) noexcept {
  return static_cast<std::size_t>(
      std::clamp<std::uint64_t>(std::bit_floor(elements / kFewestBlocks), 1, kMostBlock));
}

void widen(const float* x, std::size_t words, std::size_t n, double* y) noexcept {
  if (words == 2) {
    std::memcpy(y, x, n * sizeof *y);
  } else {
    for (std::size_t i = 0; i < n; ++i) y[i] = x[i];
  }
}

void narrow(const double* x, std::size_t words, std::size_t n, float* y) noexcept {
  if (words == 2) {
    std::memcpy(y, x, n * sizeof *x);
  } else {
    for (std::size_t i = 0; i < n; ++i) y[i] = static_cast<float>(x[i]);
  }
}

void scale(double c, const double* x, std::size_t n, double* y) noexcept {
  for (std::size_t i = 0; i < n; ++i) y[i] = c * x[i];
}

void add_scaled(double c, const double* x, std::size_t n, double* y) noexcept {
  for (std::size_t i = 0; i < n; ++i) y[i] += c * x[i];
}

double dot(const double* x, const double* y, std::size_t n) noexcept {
  return sum_in_lanes(n, [=](std::size_t i) { return x[i] * y[i]; });
}

double absolute_sum(const double* x, std::size_t n) noexcept {
  return sum_in_lanes(n, [=](std::size_t i) { return std::abs(x[i]); });
}

double absolute_maximum(const double* x, std::size_t n) noexcept {
  double most = 0;
  bool has_nan = false;
  for (std::size_t i = 0; i < n; ++i) {
    has_nan = has_nan || std::isnan(x[i]);
    most = std::max(most, std::abs(x[i]));
  }
  return has_nan ? std::nan("") : most;
}

void ExactSum::add(double x) {
  if (!std::isfinite(x)) {
    not_finite_ += x;
    return;
  }
  std::size_t kept = 0;
  for (double part : parts_) {
    if (std::abs(x) < std::abs(part)) std::swap(x, part);
    const double sum = x + part;
    if (!std::isfinite(sum)) {
      not_finite_ += sum;
      return;
    }
    const double error = part - (sum - x);
    if (error != 0) parts_[kept++] = error;
    x = sum;
  }
  parts_.resize(kept);
  parts_.push_back(x);
}

std::vector<double> ExactSum::parts() const {
  if (not_finite_ != 0) return {not_finite_};
  return parts_;
}

}  // namespace gradwire::serve
