// The cost model behind algorithm="auto" between GPUs.
#pragma once

#include "gradwire/schedule/cost.h"

namespace gradwire::cuda {

// A guess from data sheets, not measured: a round costs a group of messages and its kernels,
// whatever its size; within a host bytes are cheap. The same on every rank.
schedule::CostModel gpu_model();

}  // namespace gradwire::cuda
