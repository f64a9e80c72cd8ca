#include "gradwire/codec/simd/simd.h"

#include <immintrin.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd_tables.h"

namespace gradwire::codec {
namespace {

// Round to nearest, all exceptions masked, neither flush-to-zero nor denormals-are-zero.
constexpr unsigned kIeeeControl = 0x1F80;

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_avx2();
}

std::vector<const Kernels*> probe() {
  std::vector<const Kernels*> found;
  if (has_avx512()) found.push_back(&kAvx512Kernels);
  if (has_avx2()) found.push_back(&kAvx2Kernels);
  found.push_back(&kScalarKernels);
  return found;
}

const Kernels& choose() {
  const char* wanted = std::getenv("GRADWIRE_SIMD");
  if (wanted == nullptr || *wanted == '\0') return *available_kernels().front();
  std::string known;
  for (const Kernels* each : available_kernels()) {
    if (each->name == std::string_view(wanted)) return *each;
    known += (known.empty() ? "" : ", ") + std::string(each->name);
  }
  throw InvalidArgument(
      "GRADWIRE_SIMD='" + std::string(wanted) +
      "' is not an instruction set of this processor; unset it, or use one of: " + known);
}

}  // namespace

std::span<const Kernels* const> available_kernels() {
  static const std::vector<const Kernels*> found = probe();
  return found;
}

const Kernels& kernels() {
  static const Kernels& active = choose();
  return active;
}

FloatEnvironment::FloatEnvironment() noexcept : saved_(_mm_getcsr()) { _mm_setcsr(kIeeeControl); }
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(saved_); }

}  // namespace gradwire::codec
