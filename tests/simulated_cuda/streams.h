// What kernels.cc and streams.cc share.
#pragma once

#include <functional>
#include <random>

namespace simulated {

std::mt19937_64& random_bits();  // under the device's lock
void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& thread);

}  // namespace simulated
