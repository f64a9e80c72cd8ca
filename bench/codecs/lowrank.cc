// Speed of lowrank's three passes over a matrix, and of Gram-Schmidt, per table. Kernel and memcpy
// alternate, so that a share survives a machine that others load; medians of paired ratios. "step"
// is all that one rank computes in a call. Built by hand, next to a build tree:
//   g++ -O3 -std=c++20 -Icsrc bench/codecs/lowrank.cc -o lowrank build/release/libgradwire_codec.a
//   build/release/libgradwire_base.a
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "aligned.h"
#include "gradwire/codec/lowrank.h"
#include "gradwire/codec/simd/simd.h"

namespace {

using namespace gradwire::codec;
using Clock = std::chrono::steady_clock;

struct Arrays {
  Factors of;
  std::vector<float> x, residual, error, copy, p, q, own_q;
  std::vector<double> room;

  explicit Arrays(const Factors& shape)
      : of(shape),
        x(of.rows * of.columns, 0.7F),
        residual(x.size(), 0.1F),
        error(x.size()),
        copy(x.size()),
        p(of.rank * of.rows),
        q(of.rank * of.columns),
        own_q(q.size()) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += static_cast<float>(i % 97) * 0.01F;
    start_factor({}, of, q);
  }

  // Before each timing: values of the same size, whatever was computed on them.
  void renew() {
    std::fill(x.begin(), x.end(), 0.7F);
    start_factor({}, of, q);
    start_factor({}, {0, of.rows, of.rank}, p);
  }
};

void left(const Kernels& k, Arrays& a) {
  k.lowrank.left(a.x.data(), a.residual.data(), a.x.data(), a.q.data(), a.p.data(), a.of);
}
void gram_schmidt(const Kernels&, Arrays& a) { orthonormalise(a.of, a.p, a.room); }
void right(const Kernels& k, Arrays& a) {
  k.lowrank.right(a.x.data(), a.p.data(), a.own_q.data(), a.of);
}
void product(const Kernels& k, Arrays& a) {
  k.lowrank.product({a.p.data(), a.own_q.data(), 1 / kHeadroom, a.x.data(), a.own_q.data(),
                     1 / kHeadroom, a.x.data(), a.error.data()},
                    a.of);
}
void step(const Kernels& k, Arrays& a) {
  start_factor(a.own_q, a.of, a.q);
  left(k, a);
  gram_schmidt(k, a);
  right(k, a);
  product(k, a);
}

struct Pass {
  const char* name;
  int bytes;  // of matrices, read and written, an element
  void (*run)(const Kernels&, Arrays&);
};

constexpr Pass kPasses[] = {{"left + residual", 12, left},
                            {"right", 4, right},
                            {"product, error", 12, product},
                            {"Gram-Schmidt", 0, gram_schmidt},
                            {"step", 28, step}};

double seconds(const std::function<void()>& work, int repeats) {
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) {
    work();
    asm volatile("" ::: "memory");
  }
  return std::chrono::duration<double>(Clock::now() - start).count() / repeats;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void measure(const Factors& of) {
  Arrays arrays(of);
  const std::size_t bytes = arrays.x.size() * sizeof(float);
  const int repeats = static_cast<int>(std::max<std::size_t>(1, (1U << 20) / bytes));
  const int rounds = bytes < (1U << 20) ? 201 : 15;
  const auto copy = [&] { std::memcpy(arrays.copy.data(), arrays.residual.data(), bytes); };
  for (const Pass& pass : kPasses)
    for (const Kernels* table : available_kernels()) {
      if (table == available_kernels().back()) continue;  // the reference is not meant to be fast
      std::vector<double> times, shares;
      for (int round = 0; round < rounds; ++round) {
        const double copied = seconds(copy, repeats);
        arrays.renew();
        times.push_back(seconds([&] { pass.run(*table, arrays); }, repeats));
        shares.push_back(pass.bytes / 8.0 * copied / times.back());
      }
      std::printf("%5zu x %-5zu rank %-2zu %-16s %-7s %9.1f us %6.1f GB/s %5.0f %% of memcpy\n",
                  of.rows, of.columns, of.rank, pass.name, table->name, 1e6 * median(times),
                  pass.bytes / 4.0 * static_cast<double>(bytes) / median(times) / 1e9,
                  100 * median(shares));
    }
}

}  // namespace

int main() {
  const FloatEnvironment environment;
  for (std::size_t rank : {1, 2, 4, 8, 16}) {
    measure({256, 256, rank});
    measure({4096, 4096, rank});
  }
  measure({640, 1568, 4});
  measure({4096, 64, 4});
  measure({64, 4096, 4});
}
