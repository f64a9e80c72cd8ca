// Arrays beyond 2^32 bytes and, where there is memory for it, 2^32 elements: a pattern over and
// over, whose length divides neither, so that what a kernel counts in 32 bits gives other values.
#include <algorithm>
#include <functional>
#include <random>

#include "gpu_kernels.h"
#include "gradwire/base/types.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/sparse.h"
#include "gradwire/cuda/gpu_codec.h"

namespace gradwire::cuda {
namespace {

constexpr std::uint64_t kPattern = 2049 * codec::kSparseBlock;  // whole units of every codec
constexpr std::uint64_t kMany = 65 * kPattern + 13;             // > 2^32
constexpr std::uint64_t kFewer = 18 * kPattern + 13;            // > 2^32 bytes of float32
constexpr std::uint64_t kBytesOfMany = std::uint64_t{60} << 30, kBytesOfFewer = 16ULL << 30;

std::uint64_t elements_for(const Device& on) {
  DeviceInfo info;
  on.run(on.api.device_info(0, &info), "facts");
  return info.memory >= kBytesOfMany ? kMany : info.memory >= kBytesOfFewer ? kFewer : 0;
}

Floats draw_pattern(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> some(1 << 20);
  std::normal_distribution<float> normal;
  for (float& each : some) each = normal(random);
  Floats all(kPattern);  // drawing all of them takes seconds
  for (std::uint64_t i = 0; i < kPattern; ++i) all[i] = some[(i * 2654435761U >> 7) % some.size()];
  return all;
}

// n elements, of a pattern that is copied once and spread on the device.
class Long {
 public:
  Long(const Device& on, std::uint64_t n) : on_(on), n_(n), room_(on.api) {
    room_.take(n * sizeof(float));
  }
  float* data() const { return reinterpret_cast<float*>(room_.data()); }

  void fill(const Floats& pattern) const {
    on_.copy(data(), pattern.data(), kPattern * sizeof(float), CopyKind::kToDevice);
    for (std::uint64_t i = kPattern; i < n_; i += kPattern)
      on_.copy(data() + i, data(), std::min(kPattern, n_ - i) * sizeof(float), CopyKind::kOnDevice);
  }
  void poison() const {
    on_.run(on_.api.fill(data(), 0xEE, n_ * sizeof(float), on_.stream), "fill");
  }
  // Where it is other than the pattern, or -1.
  std::ptrdiff_t difference(const Floats& pattern) const {
    Room pinned(on_.api, Room::MemoryKind::kPinned);
    auto* const part = reinterpret_cast<float*>(pinned.take(kPattern * sizeof(float)));
    for (std::uint64_t i = 0; i < n_; i += kPattern) {
      const std::uint64_t count = std::min(kPattern, n_ - i);
      on_.copy(part, data() + i, count * sizeof(float), CopyKind::kToHost);
      if (std::memcmp(part, pattern.data(), count * sizeof(float)) == 0) continue;
      for (std::uint64_t j = 0; j < count; ++j)
        if (std::memcmp(part + j, pattern.data() + j, sizeof(float)) != 0)
          return static_cast<std::ptrdiff_t>(i + j);
    }
    return -1;
  }

 private:
  const Device& on_;
  std::uint64_t n_;
  Room room_;
};

void expect_pattern(const Long& of, const Floats& pattern, const char* what, Row& row) {
  const std::ptrdiff_t at = of.difference(pattern);
  row.expect(at < 0, std::string(what) + " differs at " + std::to_string(at));
}

void check_fold(const Device& on, std::uint64_t n, Row& row) {
  const Floats a = draw_pattern(1), b = draw_pattern(2);
  const Long acc(on, n), x(on, n);
  acc.fill(a);
  x.fill(b);
  Floats expected(kPattern);
  for (std::uint64_t i = 0; i < kPattern; ++i) expected[i] = a[i] + b[i];
  const int dtype = static_cast<int>(DType::kFloat32), op = static_cast<int>(ReduceOp::kSum);
  auto* const y = reinterpret_cast<std::byte*>(acc.data());
  const FoldSpan run{y, y, n, 0};
  on.run(on.api.fold_spans(dtype, op, &run, 1, {reinterpret_cast<std::byte*>(x.data()), 0, 1}, 1,
                           on.stream),
         "fold");
  expect_pattern(acc, expected, "sum", row);
}

// What the CPU makes of a pattern is what it makes of each repetition: its units are whole.
void check_codec(const Device& on, const char* spec, std::uint64_t n, Row& row) {
  const auto cpu = codec::make_codec(spec);
  const Floats pattern = draw_pattern(3);
  Payload payload(cpu->max_bytes(kPattern));
  payload.resize(cpu->encode(pattern.data(), kPattern, {}, payload));
  Floats expected(kPattern);
  cpu->decode(payload, expected.data(), kPattern);

  const auto codec = GpuCodec::make(on.api, *cpu);
  const Long x(on, n);
  Room out(on.api), scratch(on.api);
  x.fill(pattern);
  GpuSpan run;
  run.x = x.data();
  run.n = n;
  codec->encode(run, out.take(codec->payload_bytes(n)), scratch.take(codec->scratch_bytes(n) + 1),
                on.stream);
  x.poison();
  codec->decode(out.data(), x.data(), n, /*add=*/false, nullptr, on.stream);
  // The last elements are a unit of their own, of which a codec with means or ranks sends others.
  const Payload rest = [&] {
    Payload made(cpu->max_bytes(n % kPattern));
    made.resize(cpu->encode(pattern.data(), n % kPattern, {}, made));
    return made;
  }();
  Floats tail(n % kPattern), found(tail.size());
  cpu->decode(rest, tail.data(), tail.size());
  on.copy(found.data(), x.data() + (n - tail.size()), tail.size() * sizeof(float),
          CopyKind::kToHost);
  row.expect_same(found, tail, "the last elements");
  on.copy(x.data() + (n - tail.size()), expected.data(), tail.size() * sizeof(float),
          CopyKind::kToDevice);
  expect_pattern(x, expected, "what was decoded", row);
}

}  // namespace

void check_long(const Device& on, const Guarded& guarded) {
  const std::uint64_t n = elements_for(on);
  const std::string which = "n=" + std::to_string(n);
  if (n == 0) {
    guarded("long arrays", "float32",
            [](Row& row) { row.skip("the device has too little memory"); });
    return;
  }
  guarded("long arrays", "fold, " + which, [&](Row& row) { check_fold(on, n, row); });
  for (const char* spec : {"fp16", "int8", "onebit", "threshold:tau=1.5", "topk"})
    guarded("long arrays", std::string(spec) + ", " + which,
            [&](Row& row) { check_codec(on, spec, n, row); });
}

}  // namespace gradwire::cuda
