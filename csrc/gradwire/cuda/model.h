// The cost model behind algorithm="auto" between GPUs.
#pragma once

#include "gradwire/schedule/cost.h"

namespace gradwire::cuda {

// Returns a guess from data sheets, which is not measured and is the same on every rank: a round
// costs a group of messages and its kernels, whatever their number and size, and bytes are cheap
// within a host. So sums of any codec are `direct` there, in two rounds, and hierarchical where
// several hosts have several GPUs each: all of these send between hosts then. `gradwire tune
// --gpus` measures another one.
schedule::CostModel gpu_model();

}  // namespace gradwire::cuda
