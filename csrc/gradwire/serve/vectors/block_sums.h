// Sums over a vector with the same bits on every machine and for any number of shards: the float64
// sum of each block of elements, in a fixed order, and the exact sum of these. Blocks lie at fixed
// places of the whole vector, and shards begin at blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradwire::serve {

// The most elements of a block: a few blocks of float64 stay in the first cache.
inline constexpr std::size_t kMostBlock = 1024;

// Returns the elements of a block for vectors of so many: a power of two, of which there are at
// least 1,024 in the vector, or as many as there are elements.
std::size_t block_of(std::uint64_t elements) noexcept;

// Reads n elements of a vector as float64. `words`: the float32 words of an element, 1 for float32
// and 2 for float64.
void widen(const float* x, std::size_t words, std::size_t n, double* y) noexcept;
// Writes n elements, each rounded.
void narrow(const double* x, std::size_t words, std::size_t n, float* y) noexcept;

// y = c·x, or y += c·x, with each operation rounded to float64.
void scale(double c, const double* x, std::size_t n, double* y) noexcept;
void add_scaled(double c, const double* x, std::size_t n, double* y) noexcept;

// Sum over a block. Products of float32 are exact in float64.
double dot(const double* x, const double* y, std::size_t n) noexcept;
double absolute_sum(const double* x, std::size_t n) noexcept;
// The largest |x|; NaN where one is.
double absolute_maximum(const double* x, std::size_t n) noexcept;

// The exact sum of numbers, as a few that do not overlap (Shewchuk 1997, "Adaptive precision
// floating-point arithmetic and fast robust geometric predicates", grow-expansion). Once a number
// or a sum is not finite, it is what float64 makes of those that are not.
class ExactSum {
 public:
  void add(double x);
  std::vector<double> parts() const;

 private:
  std::vector<double> parts_;  // by their magnitude
  double not_finite_ = 0;
};

}  // namespace gradwire::serve
