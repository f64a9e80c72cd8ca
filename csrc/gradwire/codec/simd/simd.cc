#include "gradwire/codec/simd/simd.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <string>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/float_modes.h"
#include "gradwire/codec/simd/simd_tables.h"

namespace gradwire::codec {
namespace {

#if defined(__x86_64__)
// Asks the processor itself: what __builtin_cpu_supports() reads is zero in the runtime of zig's
// compiler, which builds the wheels.
struct Features {
  unsigned one = 0, seven = 0;  // ECX of CPUID's leaf 1, EBX of leaf 7
  unsigned kept = 0;            // which registers the operating system saves

  Features() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) != 0) one = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) seven = b;
    if ((one & bit_OSXSAVE) != 0) asm volatile("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
  }
};

constexpr bool has_all(unsigned found, unsigned wanted) { return (found & wanted) == wanted; }

bool has_avx2() {
  const Features features;
  return has_all(features.one, bit_AVX | bit_FMA | bit_F16C | bit_POPCNT) &&
         has_all(features.seven, bit_AVX2 | bit_BMI2) && has_all(features.kept, 0x06);
}

bool has_avx512() {
  const Features features;
  return has_avx2() && has_all(features.kept, 0xE6) &&
         has_all(features.seven, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
}

std::vector<const Kernels*> probe() {
  std::vector<const Kernels*> found;
  if (has_avx512()) found.push_back(&kAvx512Kernels);
  if (has_avx2()) found.push_back(&kAvx2Kernels);
  found.push_back(&kScalarKernels);
  return found;
}
#else
std::vector<const Kernels*> probe() { return {&kScalarKernels}; }
#endif

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

FloatEnvironment::FloatEnvironment() noexcept : saved_(float_modes()) {
  set_float_modes(kIeeeModes);
}
FloatEnvironment::~FloatEnvironment() { set_float_modes(saved_); }

}  // namespace gradwire::codec
