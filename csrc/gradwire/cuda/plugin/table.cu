// The one table that the shared object exports.
#include "gradwire/cuda/plugin/functions.h"

namespace gradwire::cuda {
namespace {

Api make_table() {
  Api api{};
  api.version = kApiVersion;
  api.bytes = sizeof(Api);
  fill_runtime(api);
  fill_fold(api);
  fill_elements(api);
  fill_cast(api);
  fill_int8(api);
  fill_int4(api);
  fill_onebit(api);
  fill_onebit_sum(api);
  fill_lowrank(api);
  fill_factors(api);
  fill_orthonormalise(api);
  fill_threshold(api);
  fill_topk(api);
  return api;
}

}  // namespace
}  // namespace gradwire::cuda

extern "C" __attribute__((visibility("default"))) const gradwire::cuda::Api* gradwire_cuda_api() {
  static const gradwire::cuda::Api api = gradwire::cuda::make_table();
  return &api;
}
