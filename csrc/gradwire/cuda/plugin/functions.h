// The parts of the plugin: each file sets its own functions in the API table.
#pragma once

#include "gradwire/cuda/api.h"

namespace gradwire::cuda {

void fill_runtime(Api& api);
void fill_fold(Api& api);
void fill_elements(Api& api);
void fill_cast(Api& api);
void fill_int8(Api& api);
void fill_int4(Api& api);
void fill_onebit(Api& api);
void fill_onebit_sum(Api& api);
void fill_lowrank(Api& api);
void fill_factors(Api& api);
void fill_orthonormalise(Api& api);
void fill_threshold(Api& api);
void fill_topk(Api& api);

}  // namespace gradwire::cuda
