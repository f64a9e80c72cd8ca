// The cost model behind algorithm="auto" between GPUs.
#pragma once

#include "gradwire/schedule/cost.h"

namespace gradwire::cuda {

// Returns a guess from data sheets, which is not measured and is the same on every rank: a round
// costs a group of messages and its kernels, whatever its size, and bytes are cheap within a host.
schedule::CostModel gpu_model();

}  // namespace gradwire::cuda
