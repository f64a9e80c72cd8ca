// Speed of the inner loops, per table, in the L2 cache and out of it, as shares of memcpy and of
// `r += g` (the traffic of error feedback in place). Kernel and yardsticks alternate, so that a
// share survives a machine that others load; medians of paired ratios. Built by hand, next to a
// build tree; arguments pick the kernels whose names contain the first, and L2 or DRAM, and give
// the block of int8 and onebit (int4 has blocks of 32):
//   g++ -O3 -std=c++20 -Icsrc bench/codecs/kernels.cc -o kernels build/release/libgradwire_codec.a
//   build/release/libgradwire_base.a
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "aligned.h"
#include "gradwire/codec/simd/simd.h"
#include "stopwatch.h"

namespace {

using gradwire::codec::Kernels;
using gradwire::codec::OneBitPlane;
using gradwire::codec::RandomPosition;

std::size_t block_size = 1024;

std::size_t onebit_bytes() { return 8 + block_size / 8; }  // of a block without a mask
constexpr std::size_t kPayloads = 8;

struct Arrays {
  std::vector<float> x, y, residual, error;
  std::vector<std::byte> payload;

  explicit Arrays(std::size_t n) : x(n), y(n), residual(n), error(n), payload(2 * n) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& each : x) each = normal(random);
  }
  // Before each measurement, so that values neither grow nor settle.
  void reset() {
    std::fill(y.begin(), y.end(), 0.1F);
    std::fill(residual.begin(), residual.end(), 0.01F);
  }
  std::size_t size() const { return x.size(); }
};

struct Case {
  std::string name;
  double bytes;  // read and written, an element
  std::function<void(const Kernels&, Arrays&)> run;
  std::function<void(const Kernels&, Arrays&)> prepare = [](const Kernels&, Arrays&) {};
};

void measure(const char* where, std::size_t n, int repeats, const std::vector<Case>& cases) {
  Arrays arrays(n);
  const auto sum = gradwire::codec::available_kernels().front()->reduce[0][0];
  const auto copy = [&] {
    std::memcpy(arrays.y.data(), arrays.x.data(), n * sizeof(float));
    asm volatile("" ::: "memory");
  };
  const auto add = [&] { sum(arrays.residual.data(), arrays.x.data(), n); };
  for (const Case& each : cases)
    for (const Kernels* table : gradwire::codec::available_kernels()) {
      std::vector<double> rates, of_copy, of_add;
      each.prepare(*table, arrays);
      for (int round = 0; round < 25; ++round) {
        arrays.reset();
        const double copied = 8.0 * n / seconds(repeats, copy);
        const double added = 12.0 * n / seconds(repeats, add);
        arrays.reset();
        const double rate = each.bytes * static_cast<double>(n) /
                            seconds(repeats, [&] { each.run(*table, arrays); });
        rates.push_back(rate);
        of_copy.push_back(rate / copied);
        of_add.push_back(rate / added);
      }
      std::printf("%-5s %-32s %-7s %7.1f GB/s %6.0f %% of memcpy %6.0f %% of r += g\n", where,
                  each.name.c_str(), table->name, median(rates) / 1e9, 100 * median(of_copy),
                  100 * median(of_add));
      std::fflush(stdout);
    }
}

std::vector<Case> folds() {
  return {
      {"fold float32 sum", 12,
       [](const Kernels& k, Arrays& a) { k.reduce[0][0](a.y.data(), a.x.data(), a.size()); }},
      {"fold float32 max", 12,
       [](const Kernels& k, Arrays& a) { k.reduce[0][3](a.y.data(), a.x.data(), a.size()); }},
      {"fold float16 sum", 6,
       [](const Kernels& k, Arrays& a) { k.reduce[2][0](a.payload.data(), a.x.data(), a.size()); }},
  };
}

std::vector<Case> casts() {
  return {
      {"fp16 encode", 6,
       [](const Kernels& k, Arrays& a) {
         k.fp16.encode(a.x.data(), nullptr, 1, a.payload.data(), nullptr, a.size());
       }},
      {"fp16 encode, error in place", 14,
       [](const Kernels& k, Arrays& a) {
         k.fp16.encode(a.x.data(), a.residual.data(), 1, a.payload.data(), a.residual.data(),
                       a.size());
       }},
      {"fp16 decode_add", 10,
       [](const Kernels& k, Arrays& a) {
         k.fp16.decode_add(a.payload.data(), 1, a.y.data(), a.size());
       }},
      {"bf16 encode", 6,
       [](const Kernels& k, Arrays& a) {
         k.bf16.encode(a.x.data(), nullptr, 1, a.payload.data(), nullptr, a.size());
       }},
      {"bf16 encode, error in place", 14,
       [](const Kernels& k, Arrays& a) {
         k.bf16.encode(a.x.data(), a.residual.data(), 1, a.payload.data(), a.residual.data(),
                       a.size());
       }},
      {"bf16 decode_add", 10,
       [](const Kernels& k, Arrays& a) {
         k.bf16.decode_add(a.payload.data(), 1, a.y.data(), a.size());
       }},
  };
}

// int8 or int4. `part`: bytes of a payload, an element.
template <auto kCodec>
struct Integers {
  const char* name;
  double part;
  std::size_t (*block)();

  // `error` of the arrays is where e' goes: beside e, as in a collective, or in its place.
  Case encode(const char* how, double bytes, std::vector<float> Arrays::* residual,
              std::vector<float> Arrays::* error, const RandomPosition* position = nullptr) const {
    return {std::string(name) + how, bytes + part, [=, *this](const Kernels& k, Arrays& a) {
              (k.*kCodec).encode(a.x.data(), residual == nullptr ? nullptr : (a.*residual).data(),
                                 a.size(), block(), position, a.payload.data(),
                                 error == nullptr ? nullptr : (a.*error).data());
            }};
  }

  std::vector<Case> all() const {
    static const RandomPosition position{1, 2, 0};
    const Case plain = encode(" encode", 4, nullptr, nullptr);
    const auto in_place = &Arrays::residual;
    return {plain,
            encode(" encode, error in place", 12, in_place, in_place),
            encode(" encode, error beside", 12, in_place, &Arrays::error),
            encode(" stochastic, error in place", 12, in_place, in_place, &position),
            {std::string(name) + " decode", 4 + part,
             [*this](const Kernels& k, Arrays& a) {
               (k.*kCodec).decode(a.payload.data(), a.size(), block(), a.y.data());
             },
             plain.run},
            {std::string(name) + " decode_add", 8 + part,
             [*this](const Kernels& k, Arrays& a) {
               (k.*kCodec).decode_add(a.payload.data(), a.size(), block(), a.y.data());
             },
             plain.run}};
  }
};

std::vector<Case> int8() {
  return Integers<&Kernels::int8>{"int8", 1, [] { return block_size; }}.all();
}
std::vector<Case> int4() {
  return Integers<&Kernels::int4>{"int4", 0.5625, [] { return std::size_t{32}; }}.all();
}

// Payloads lie one after the other; all of a block's are added before the next block's.
void sum_payloads(const Kernels& k, Arrays& a, std::size_t payloads, bool add) {
  const std::size_t size = a.size() / block_size * onebit_bytes();
  for (std::size_t block = 0; block < a.size() / block_size; ++block)
    for (std::size_t p = 0; p < payloads; p += 4) {
      OneBitPlane planes[4];
      const std::size_t count = std::min<std::size_t>(4, payloads - p);
      for (std::size_t i = 0; i < count; ++i) {
        const std::byte* from = a.payload.data() + (p + i) * size + block * onebit_bytes();
        float means[2];
        std::memcpy(means, from, sizeof means);
        planes[i] = {from + 8, nullptr, means[0], means[1]};
      }
      k.one_bit.sum(planes, count, add || p > 0, a.y.data() + block * block_size, block_size);
    }
}

Case onebit_sum(std::size_t payloads, bool add) {
  const double bytes = (add ? 8 : 4) + static_cast<double>(payloads) / 8;
  return {std::string("onebit ") + (add ? "add to y of " : "sum of ") + std::to_string(payloads),
          bytes, [=](const Kernels& k, Arrays& a) { sum_payloads(k, a, payloads, add); },
          [](const Kernels& k, Arrays& a) {
            for (std::size_t p = 0; p < kPayloads; ++p)
              k.one_bit.encode(a.x.data(), nullptr, a.size(), block_size,
                               a.payload.data() + p * (a.size() / block_size * onebit_bytes()),
                               nullptr);
          }};
}

Case onebit_encode(const char* name, double bytes, std::vector<float> Arrays::* residual,
                   std::vector<float> Arrays::* error) {
  return {name, bytes, [=](const Kernels& k, Arrays& a) {
            k.one_bit.encode(a.x.data(), residual == nullptr ? nullptr : (a.*residual).data(),
                             a.size(), block_size, a.payload.data(),
                             error == nullptr ? nullptr : (a.*error).data());
          }};
}

std::vector<Case> onebit() {
  return {
      onebit_encode("onebit encode", 4.13, nullptr, nullptr),
      onebit_encode("onebit encode, error in place", 12.13, &Arrays::residual, &Arrays::residual),
      onebit_encode("onebit encode, error beside", 12.13, &Arrays::residual, &Arrays::error),
      onebit_sum(1, true),
      onebit_sum(4, false),
      onebit_sum(4, true),
      onebit_sum(8, false),
      onebit_sum(8, true),
  };
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Case> cases;
  for (const auto& list : {folds(), casts(), int8(), int4(), onebit()})
    for (const Case& each : list)
      if (argc < 2 || each.name.find(argv[1]) != std::string::npos) cases.push_back(each);
  if (argc > 3) block_size = std::stoul(argv[3]);
  if (argc < 3 || argv[2] == std::string("L2")) measure("L2", 32 << 10, 50, cases);
  if (argc < 3 || argv[2] == std::string("DRAM")) measure("DRAM", 16 << 20, 1, cases);
}
