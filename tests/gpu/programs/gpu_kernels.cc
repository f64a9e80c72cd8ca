// Whether the kernels of gradwire's CUDA part give the CPU's bits, in one process, on the device
// that the library has: a GPU, or tests/simulated_cuda's. Prints a line of JSON for each group.
//   gpu_kernels LIBRARY small     few elements: for the simulated device, and compute-sanitizer
//   gpu_kernels LIBRARY all       up to a million
//   gpu_kernels LIBRARY long      beyond 2^32 bytes, and elements where memory allows it
//   gpu_kernels LIBRARY all topk  codecs alone, and of these those whose names begin so
#include "gpu_kernels.h"

#include <exception>

#include "gradwire/codec/simd/simd.h"

namespace gradwire::cuda {
namespace {

// What one name of the table needs; a library may be without the codec.
bool has(const Api& api, std::string_view spec) {
  if (spec.starts_with("onebit")) return api.onebit_encode_spans != nullptr;
  if (spec.starts_with("threshold")) return api.threshold_encode_spans != nullptr;
  if (spec.starts_with("topk")) return api.topk_encode_spans != nullptr;
  if (spec.starts_with("int4")) return api.int4_encode_spans != nullptr;
  if (spec.starts_with("int8")) return api.int8_encode_spans != nullptr;
  return api.cast_encode_spans != nullptr;
}

void guarded(const std::string& group, const std::string& which,
             const std::function<void(Row&)>& body) {
  Row row(group, which);
  try {
    body(row);
  } catch (const std::exception& error) {
    row.fail(error.what());
  }
}

// The functions of the table are all its members from `describe` on.
void check_table(const Device& on) {
  guarded("table of functions", "all", [&](Row& row) {
    const auto* const first = reinterpret_cast<void (*const*)()>(&on.api.describe);
    const auto* const last = reinterpret_cast<void (*const*)()>(&on.api + 1);
    for (const auto* each = first; each < last; ++each)
      row.expect(*each != nullptr, "the library lacks number " + std::to_string(each - first));
  });
}

int run(const char* library, std::string_view extent, std::string_view codecs) {
  const codec::FloatEnvironment environment;
  const Device on(load_api(library));
  const bool small = extent == "small";
  if (extent == "long") {
    check_long(on, guarded);
    return 0;
  }
  if (codecs.empty()) check_table(on);
  for (const std::string_view spec : codec_specs(small))
    if (spec.starts_with(codecs) && has(on.api, spec))
      for (const std::size_t n : codec_lengths(spec, small))
        guarded("codec " + std::string(spec), "n=" + std::to_string(n),
                [&](Row& row) { check_codec(on, spec, n, small, row); });
  if (!codecs.empty()) return 0;
  check_payloads(on, small, guarded);
  check_elements(on, small, guarded);
  check_matrices(on, small, guarded);
  return 0;
}

}  // namespace
}  // namespace gradwire::cuda

int main(int argc, char** argv) {
  try {
    if (argc == 3 || argc == 4)
      return gradwire::cuda::run(argv[1], argv[2], argc == 4 ? argv[3] : "");
    std::fprintf(stderr, "gpu_kernels LIBRARY small|all|long [CODECS]\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_kernels: %s\n", error.what());
  }
  return 1;
}
