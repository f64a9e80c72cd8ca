// Each class binds a codec's parameters to the kernels of cuda/api.h and says how much memory they
// need. The arithmetic is that of codec/, so there is none here.
#include "gradwire/cuda/gpu_codec.h"

#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/blocks.h"
#include "gradwire/codec/sparse.h"
#include "gradwire/cuda/device.h"

namespace gradwire::cuda {
namespace {

using Kind = codec::Definition::Kind;

class CastCodec final : public Codec {
 public:
  CastCodec(const Api& api, const codec::Definition& of)
      : Codec(api), cast_(of.kind == Kind::kFp16 ? Cast::kFp16 : Cast::kBf16), scale_(of.scale) {}

  std::size_t payload_bytes(std::uint64_t n) const override { return aligned(2 * n); }
  void encode(const Run& run, std::byte* out, std::byte*, Stream stream) const override {
    check(api_, api_.cast_encode(cast_, run.x, run.run_feedback, scale_, out, run.n, stream),
          "encoding a cast");
  }
  void decode(const std::byte* in, float* y, std::uint64_t n, bool add, std::uint32_t* flags,
              Stream stream) const override {
    check(api_, api_.cast_decode(cast_, in, scale_, y, n, add, flags, stream), "decoding a cast");
  }

 private:
  Cast cast_;
  float scale_;
};

class Int8Codec final : public Codec {
 public:
  Int8Codec(const Api& api, const codec::Definition& of) : Codec(api), of_(of) {}

  std::size_t payload_bytes(std::uint64_t n) const override {
    return aligned(codec::Int8Kernels::bytes(n, of_.block));
  }
  void encode(const Run& run, std::byte* out, std::byte*, Stream stream) const override {
    const Int8Rounding rounding{of_.stochastic, of_.seed, run.call, run.element};
    check(api_, api_.int8_encode(run.x, run.run_feedback, run.n, of_.block, rounding, out, stream),
          "encoding int8");
  }
  void decode(const std::byte* in, float* y, std::uint64_t n, bool add, std::uint32_t* flags,
              Stream stream) const override {
    check(api_, api_.int8_decode(in, n, of_.block, y, add, flags, stream), "decoding int8");
  }

 private:
  codec::Definition of_;
};

// A payload of units whose sizes vary: a table of the sizes, then a slot for each unit. So no rank
// has to know a size before the kernel runs.
class SlottedCodec : public Codec {
 protected:
  using Codec::Codec;
  static std::uint32_t* sizes(std::byte* payload) {
    return reinterpret_cast<std::uint32_t*>(payload);
  }
  template <typename Byte>
  Byte* slots(Byte* payload, std::uint64_t n) const {
    return payload + layout(n).table_bytes();
  }
};

class OneBitCodec final : public SlottedCodec {
 public:
  OneBitCodec(const Api& api, const codec::Definition& of) : SlottedCodec(api), block_(of.block) {}

  std::size_t slot_bytes() const override {
    return aligned(codec::OneBitKernels::most_bytes(block_));
  }
  Slotted layout(std::uint64_t n) const override {
    return {(n + block_ - 1) / block_, slot_bytes()};
  }
  void encode(const Run& run, std::byte* out, std::byte*, Stream stream) const override {
    check(api_,
          api_.onebit_encode(run.x, run.run_feedback, run.n, block_, slots(out, run.n), sizes(out),
                             stream),
          "encoding onebit");
  }
  void decode(const std::byte* in, float* y, std::uint64_t n, bool add, std::uint32_t* flags,
              Stream stream) const override {
    const Slots payload{slots(in, n), nullptr};
    check(api_, api_.onebit_sum(&payload, 1, n, block_, y, add, flags, stream), "decoding onebit");
  }
  // One kernel for all payloads, so that y is written once and not once per payload.
  void decode_sum(std::span<const std::byte* const> payloads, float* y, std::uint64_t n,
                  std::uint32_t* flags, Stream stream) const override {
    std::vector<Slots> all;
    for (const std::byte* each : payloads) all.push_back({slots(each, n), nullptr});
    check(api_,
          api_.onebit_sum(all.data(), static_cast<int>(all.size()), n, block_, y, /*add=*/false,
                          flags, stream),
          "decoding onebit");
  }
  void finish(const Run& run, std::byte* out, std::byte*, float* y, float factor,
              std::uint32_t* flags, Stream stream) const override {
    check(api_,
          api_.onebit_finish(run.x, run.run_feedback, run.n, block_, slots(out, run.n), sizes(out),
                             y, factor, flags, stream),
          "finishing onebit");
  }

 private:
  std::uint64_t block_;
};

class SparseCodec : public SlottedCodec {
 public:
  using SlottedCodec::SlottedCodec;
  Slotted layout(std::uint64_t n) const override {
    return {(n + codec::kSparseUnit - 1) / codec::kSparseUnit, slot_bytes()};
  }
  std::size_t scratch_bytes(std::uint64_t n) const override {
    return aligned(api_.sparse_scratch_bytes(n));
  }
};

class ThresholdCodec final : public SparseCodec {
 public:
  ThresholdCodec(const Api& api, const codec::Codec& codec)
      : SparseCodec(api),
        of_(codec.definition()),
        slot_bytes_(aligned(codec.max_bytes(codec::kSparseUnit))) {}

  std::size_t slot_bytes() const override { return slot_bytes_; }
  bool adapts() const override { return of_.tau == 0; }
  void prepare(const Run& run, std::byte* scratch, Stream stream) const override {
    if (!adapts()) return;
    check(api_,
          api_.threshold_prepare(run.x, run.run_feedback, run.n, of_.density, scratch, stream),
          "preparing threshold");
  }
  void adapt(std::uint64_t n, KeyState* key_state, Stream stream) const override {
    if (!adapts()) return;
    check(api_, api_.threshold_adapt(n, of_.density, key_state, stream), "adapting threshold");
  }
  void encode(const Run& run, std::byte* out, std::byte* scratch, Stream stream) const override {
    check(api_,
          api_.threshold_encode(run.x, run.run_feedback, run.n, of_.tau, of_.density,
                                slots(out, run.n), sizes(out), scratch, stream),
          "encoding threshold");
  }
  void decode(const std::byte* in, float* y, std::uint64_t n, bool add, std::uint32_t* flags,
              Stream stream) const override {
    check(api_, api_.threshold_decode({slots(in, n), nullptr}, n, y, add, flags, stream),
          "decoding threshold");
  }

 private:
  codec::Definition of_;
  std::size_t slot_bytes_;
};

class TopKCodec final : public SparseCodec {
 public:
  TopKCodec(const Api& api, const codec::Codec& codec)
      : SparseCodec(api),
        density_(codec.definition().density),
        values_(codec.definition().values == Kind::kFp16   ? Values::kFp16
                : codec.definition().values == Kind::kBf16 ? Values::kBf16
                                                           : Values::kFloat32),
        slot_bytes_(aligned(codec.max_bytes(codec::kSparseUnit))) {}

  std::size_t slot_bytes() const override { return slot_bytes_; }
  void encode(const Run& run, std::byte* out, std::byte* scratch, Stream stream) const override {
    check(api_,
          api_.topk_encode(run.x, run.run_feedback, run.n, density_, values_, slot_bytes_,
                           slots(out, run.n), sizes(out), scratch, stream),
          "encoding topk");
  }
  void decode(const std::byte* in, float* y, std::uint64_t n, bool add, std::uint32_t* flags,
              Stream stream) const override {
    check(api_,
          api_.topk_decode({slots(in, n), nullptr}, n, slot_bytes_, values_, y, add, flags, stream),
          "decoding topk");
  }

 private:
  double density_;
  Values values_;
  std::size_t slot_bytes_;
};

}  // namespace

std::unique_ptr<const Codec> Codec::make(const Api& api, const codec::Codec& codec) {
  const codec::Definition of = codec.definition();
  switch (of.kind) {
    case Kind::kFp16:
    case Kind::kBf16:
      return std::make_unique<CastCodec>(api, of);
    case Kind::kInt8:
      return std::make_unique<Int8Codec>(api, of);
    case Kind::kOneBit:
      return std::make_unique<OneBitCodec>(api, of);
    case Kind::kThreshold:
      return std::make_unique<ThresholdCodec>(api, codec);
    case Kind::kTopK:
      return std::make_unique<TopKCodec>(api, codec);
    default:
      throw InvalidArgument("codec '" + codec.name() + "' has no payloads on a GPU");
  }
}

void Codec::scale(float* y, double factor, std::uint64_t n, Stream stream) const {
  if (factor == 1) return;
  check(api_, api_.scale(static_cast<int>(DType::kFloat32), y, factor, n, stream), "scaling");
}

void Codec::decode_sum(std::span<const std::byte* const> payloads, float* y, std::uint64_t n,
                       std::uint32_t* flags, Stream stream) const {
  for (std::size_t i = 0; i < payloads.size(); ++i)
    decode(payloads[i], y, n, /*add=*/i > 0, flags, stream);
}

void Codec::finish(const Run& run, std::byte* out, std::byte* scratch, float* y, float factor,
                   std::uint32_t* flags, Stream stream) const {
  encode(run, out, scratch, stream);
  decode(out, y, run.n, /*add=*/false, flags, stream);
  scale(y, factor, run.n, stream);
}

}  // namespace gradwire::cuda
