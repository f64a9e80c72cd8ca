// Speed of threshold and topk, encoding with feedback, in the L2 cache and out of it, as shares of
// memcpy and of `r += g`, which alternate with them: medians of paired ratios, of 12 bytes an
// element plus what is sent. Then bytes an element that is sent, and what units of other sizes
// would catch. The instruction set is what GRADWIRE_SIMD says. Built by hand, next to a build tree:
//   g++ -O3 -std=c++20 -Icsrc bench/codecs/kernels_sparse.cc -o kernels_sparse
//   build/release/libgradwire_codec.a build/release/libgradwire_base.a
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "aligned.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/sparse.h"
#include "stopwatch.h"

namespace {

using namespace gradwire::codec;
using Values = std::vector<float>;

Values gaussian(std::size_t n, float scale) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, scale);
  Values x(n);
  for (float& each : x) each = normal(random);
  return x;
}

struct Case {
  std::string name, spec;
  float filter;  // CodecState::filter at the start of each call
};

// In place, as it is used: x is 0, so that only what is sent changes the residual, and is put back.
class Bench {
 public:
  Bench(const char* where, std::size_t n, int repeats)
      : where_(where),
        n_(n),
        repeats_(repeats),
        x_(n),
        start_(gaussian(n, 1)),
        residual_(start_),
        y_(n) {}

  void measure(const Case& each) {
    const auto codec = make_codec(each.spec);
    std::vector<std::byte> payload(codec->max_bytes(n_));
    std::size_t size = 0;
    const auto encode = [&] {
      CodecState codec_state{.filter = each.filter};
      const EncodeContext context{
          .residual = residual_.data(), .error = residual_.data(), .codec_state = &codec_state};
      size = codec->encode(x_.data(), n_, context, payload);
    };
    std::vector<std::size_t> sent;
    encode();
    for (std::size_t i = 0; i < n_; ++i)
      if (residual_[i] != start_[i]) sent.push_back(i);
    const auto put_back = [&] {
      for (const std::size_t i : sent) residual_[i] = start_[i];
    };
    std::vector<double> rates, of_copy, of_add;
    for (int round = 0; round < 25; ++round) {
      put_back();
      const double copied = 8 / seconds(repeats_, [&] { copy(); });
      const double added = 12 / seconds(repeats_, [&] { add(); });
      const double time = seconds(repeats_, [&] { encode(), put_back(); });
      const double back = seconds(repeats_, put_back);
      const double rate =
          (12 + static_cast<double>(size) / static_cast<double>(n_)) / (time - back);
      rates.push_back(rate * static_cast<double>(n_));
      of_copy.push_back(rate / copied);
      of_add.push_back(rate / added);
    }
    std::printf("%-5s %-24s %-7s %7.1f GB/s %6.0f %% of memcpy %6.0f %% of r += g\n", where_,
                each.name.c_str(), kernels().name, median(rates) / 1e9, 100 * median(of_copy),
                100 * median(of_add));
    std::fflush(stdout);
  }

 private:
  void copy() {
    std::memcpy(y_.data(), x_.data(), n_ * sizeof(float));
    asm volatile("" ::: "memory");
  }
  void add() { kernels().reduce[0][0](residual_.data(), x_.data(), n_); }

  const char* where_;
  std::size_t n_;
  int repeats_;
  Values x_, start_, residual_, y_;
};

void print_bytes() {
  const Values x = gaussian(1 << 22, 1);
  for (const char* name : {"threshold", "topk"})
    for (const char* density : {"0.0001", "0.001", "0.01", "0.1", "0.5"}) {
      const auto codec = make_codec(std::string(name) + ":density=" + density);
      std::vector<std::byte> payload(codec->max_bytes(x.size()));
      const double bytes = static_cast<double>(codec->encode(x.data(), x.size(), {}, payload));
      const double elements = static_cast<double>(x.size());
      std::printf("%-9s density %-6s %8.5f bytes an element, %6.2f bits a sent one\n", name,
                  density, bytes / elements, 8 * bytes / elements / std::stod(density));
    }
}

double squares_of_largest(Values v, std::size_t k) {
  for (float& each : v) each *= each;
  const auto end = v.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(v.begin(), end - 1, v.end(), std::greater<>());
  double sum = 0;
  for (auto each = v.begin(); each != end; ++each) sum += *each;
  return sum;
}

// Of a matrix whose rows of 512 differ in scale as e^N(0, 1) does.
void print_units(double density) {
  Values v = gaussian(1 << 22, 1);
  const Values scales = gaussian(v.size() / 512, 1);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] *= std::exp(scales[i / 512]);
  const double all = squares_of_largest(v, share_of(density, v.size()));
  for (std::size_t unit = 1024; unit <= 262144; unit *= 2) {
    double sum = 0;
    for (auto at = v.begin(); at != v.end(); at += static_cast<std::ptrdiff_t>(unit))
      sum +=
          squares_of_largest({at, at + static_cast<std::ptrdiff_t>(unit)}, share_of(density, unit));
    std::printf("units of %6zu at density %g: %5.1f %% of the squares of one top-k of all\n", unit,
                density, 100 * sum / all);
  }
}

}  // namespace

int main() {
  const FloatEnvironment environment;
  const std::vector<Case> cases = {{"threshold 0.1 %", "threshold:tau=3.307", 0},
                                   {"threshold 1 %", "threshold:tau=2.589", 0},
                                   {"threshold 10 %", "threshold:tau=1.653", 0},
                                   {"topk 0.1 %, sampled", "topk", 0},
                                   {"topk 0.1 %, last filter", "topk", 3.1F},
                                   {"topk 1 %, last filter", "topk:density=0.01", 2.43F},
                                   {"topk 10 %, last filter", "topk:density=0.1", 1.55F}};
  Bench cached("L2", kSparseUnit, 100), uncached("DRAM", 16 << 20, 1);
  for (const Case& each : cases) cached.measure(each), uncached.measure(each);
  print_bytes();
  for (const double density : {0.001, 0.01}) print_units(density);
}
