// Speed of the inner loops as a share of memcpy, per table, in the L2 cache and out of it. Kernel
// and memcpy alternate, so that a share survives a machine that others load; medians of paired
// ratios. Built by hand, next to a build tree:
//   g++ -O3 -std=c++20 -Icsrc bench/kernels.cc -o kernels build/libgradwire_codec.a
//   build/libgradwire_base.a
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "gradwire/codec/simd.h"

namespace {

using gradwire::codec::Kernels;
using Clock = std::chrono::steady_clock;

struct Arrays {
  std::vector<float> x, y, error;
  std::vector<std::byte> payload;
  explicit Arrays(std::size_t n) : x(n, 0.7F), y(n), error(n), payload(2 * n) {}
};

struct Case {
  const char* name;
  int bytes;  // read and written, an element
  std::function<void(const Kernels&, Arrays&)> run;
};

double seconds(int repeats, const std::function<void()>& work) {
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) work();
  return std::chrono::duration<double>(Clock::now() - start).count() / repeats;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void measure(const char* where, std::size_t n, int repeats, const std::vector<Case>& cases) {
  Arrays arrays(n);
  const auto copy = [&] {
    std::memcpy(arrays.y.data(), arrays.x.data(), n * sizeof(float));
    asm volatile("" ::: "memory");
  };
  for (const Case& each : cases)
    for (const Kernels* table : gradwire::codec::available_kernels()) {
      std::vector<double> rates, shares;
      for (int round = 0; round < 25; ++round) {
        const double copied = 8.0 * n / seconds(repeats, copy);
        std::fill(arrays.y.begin(), arrays.y.end(), 0.1F);
        const double rate = each.bytes * static_cast<double>(n) /
                            seconds(repeats, [&] { each.run(*table, arrays); });
        rates.push_back(rate);
        shares.push_back(rate / copied);
      }
      std::printf("%-5s %-22s %-7s %7.1f GB/s %6.0f %% of memcpy\n", where, each.name, table->name,
                  median(rates) / 1e9, 100 * median(shares));
    }
}

}  // namespace

int main() {
  const std::vector<Case> cases = {
      {"fold float32 sum", 12,
       [](const Kernels& k, Arrays& a) { k.reduce[0][0](a.y.data(), a.x.data(), a.x.size()); }},
      {"fold float32 max", 12,
       [](const Kernels& k, Arrays& a) { k.reduce[0][3](a.y.data(), a.x.data(), a.x.size()); }},
      {"fold float16 sum", 6,
       [](const Kernels& k, Arrays& a) {
         k.reduce[2][0](a.payload.data(), a.x.data(), a.x.size());
       }},
      {"fp16 encode", 6,
       [](const Kernels& k, Arrays& a) {
         k.fp16.encode(a.x.data(), nullptr, 1, a.payload.data(), nullptr, a.x.size());
       }},
      {"fp16 encode, error", 10,
       [](const Kernels& k, Arrays& a) {
         k.fp16.encode(a.x.data(), nullptr, 1, a.payload.data(), a.error.data(), a.x.size());
       }},
      {"fp16 decode_add", 10,
       [](const Kernels& k, Arrays& a) {
         k.fp16.decode_add(a.payload.data(), 1, a.y.data(), a.x.size());
       }},
      {"bf16 encode", 6,
       [](const Kernels& k, Arrays& a) {
         k.bf16.encode(a.x.data(), nullptr, 1, a.payload.data(), nullptr, a.x.size());
       }},
      {"bf16 decode_add", 10,
       [](const Kernels& k, Arrays& a) {
         k.bf16.decode_add(a.payload.data(), 1, a.y.data(), a.x.size());
       }},
  };
  measure("L2", 32 << 10, 200, cases);
  measure("DRAM", 16 << 20, 1, cases);
}
