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

int count(std::span<const Run> runs) { return static_cast<int>(runs.size()); }

class CastCodec final : public Codec {
 public:
  CastCodec(const Api& api, const codec::Definition& of)
      : Codec(api), cast_(of.kind == Kind::kFp16 ? Cast::kFp16 : Cast::kBf16), scale_(of.scale) {}

  std::size_t payload_bytes(std::uint64_t n) const override { return aligned(2 * n); }
  void encode(std::span<const Run> runs, const Encoding& how, std::byte*, std::uint32_t* flags,
              Stream stream) const override {
    check(api_, api_.cast_encode_runs(cast_, scale_, runs.data(), count(runs), how, flags, stream),
          "encoding a cast");
  }
  void decode(std::span<const Run> runs, const Decoding& how, std::uint32_t* flags,
              Stream stream) const override {
    check(api_, api_.cast_decode_runs(cast_, scale_, runs.data(), count(runs), how, flags, stream),
          "decoding a cast");
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
  void encode(std::span<const Run> runs, const Encoding& how, std::byte*, std::uint32_t* flags,
              Stream stream) const override {
    const Int8Rounding rounding{of_.stochastic, of_.seed, 0, 0};
    check(api_,
          api_.int8_encode_runs(of_.block, rounding, runs.data(), count(runs), how, flags, stream),
          "encoding int8");
  }
  void decode(std::span<const Run> runs, const Decoding& how, std::uint32_t* flags,
              Stream stream) const override {
    check(api_, api_.int8_decode_runs(of_.block, runs.data(), count(runs), how, flags, stream),
          "decoding int8");
  }

 private:
  codec::Definition of_;
};

// A payload of units whose sizes vary is a table of the sizes, then a slot for each unit. So no
// rank has to know a size before the kernel runs.
class OneBitCodec final : public Codec {
 public:
  OneBitCodec(const Api& api, const codec::Definition& of) : Codec(api), block_(of.block) {}

  std::size_t slot_bytes() const override {
    return aligned(codec::OneBitKernels::most_bytes(block_));
  }
  Slotted layout(std::uint64_t n) const override {
    return {(n + block_ - 1) / block_, slot_bytes()};
  }
  void encode(std::span<const Run> runs, const Encoding& how, std::byte*, std::uint32_t* flags,
              Stream stream) const override {
    check(api_, api_.onebit_encode_runs(block_, runs.data(), count(runs), how, flags, stream),
          "encoding onebit");
  }
  void decode(std::span<const Run> runs, const Decoding& how, std::uint32_t* flags,
              Stream stream) const override {
    check(api_, api_.onebit_decode_runs(block_, runs.data(), count(runs), how, flags, stream),
          "decoding onebit");
  }

 private:
  std::uint64_t block_;
};

// Its kernels neither add what was received nor finish, so that these are launches of their own.
class SparseCodec : public Codec {
 public:
  using Codec::Codec;
  using Codec::scratch_bytes;
  Slotted layout(std::uint64_t n) const override { return {units_of(n), slot_bytes()}; }
  std::size_t scratch_bytes(std::span<const std::uint64_t> counts) const override {
    std::uint64_t units = 0;
    for (const std::uint64_t each : counts) units += units_of(each);
    return aligned(scratch_of(units));
  }
  void encode(std::span<const Run> runs, const Encoding& how, std::byte* scratch,
              std::uint32_t* flags, Stream stream) const final {
    if (how.received.count > 0) add(runs, how.received, flags, stream);
    write(runs, how.out, scratch, stream);
    if (how.finishes)
      read(runs, {.payloads = {how.out, 0, 1}, .factor = how.factor}, flags, stream);
  }
  void decode(std::span<const Run> runs, const Decoding& how, std::uint32_t* flags,
              Stream stream) const final {
    Decoding one = how;
    one.payloads.count = 1;
    for (int j = 0; j < how.payloads.count; ++j) {
      one.adds = how.adds || j > 0;
      one.factor = how.payloads.count == 1 ? how.factor : 1;
      one.payloads.first = how.payloads.first + how.payloads.offset(j);
      read(runs, one, flags, stream);
    }
    if (how.payloads.count > 1 && how.factor != 1) scale(runs, how.factor, stream);
  }

 private:
  static std::uint64_t units_of(std::uint64_t n) {
    return (n + codec::kSparseUnit - 1) / codec::kSparseUnit;
  }
  virtual std::size_t scratch_of(std::uint64_t units) const = 0;
  virtual void write(std::span<const Run> runs, std::byte* out, std::byte* scratch,
                     Stream stream) const = 0;
  virtual void read(std::span<const Run> runs, const Decoding& one, std::uint32_t* flags,
                    Stream stream) const = 0;

  void add(std::span<const Run> runs, const Payloads& received, std::uint32_t* flags,
           Stream stream) const {
    std::vector<Run> all(runs.begin(), runs.end());
    for (Run& each : all) each.payload = each.received;
    decode(all, {.payloads = received, .adds = true}, flags, stream);
  }
  void scale(std::span<const Run> runs, double factor, Stream stream) const {
    for (const Run& each : runs)
      check(api_, api_.scale(static_cast<int>(DType::kFloat32), each.y, factor, each.n, stream),
            "scaling");
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

 private:
  std::size_t scratch_of(std::uint64_t units) const override {
    return api_.threshold_scratch_bytes(units);
  }
  void write(std::span<const Run> runs, std::byte* out, std::byte* scratch,
             Stream stream) const override {
    check(api_,
          api_.threshold_encode_runs(of_.tau, of_.density, runs.data(), count(runs), {.out = out},
                                     scratch, stream),
          "encoding threshold");
  }
  void read(std::span<const Run> runs, const Decoding& one, std::uint32_t* flags,
            Stream stream) const override {
    check(api_, api_.threshold_decode_runs(runs.data(), count(runs), one, flags, stream),
          "decoding threshold");
  }

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

 private:
  std::size_t scratch_of(std::uint64_t units) const override {
    return api_.topk_scratch_bytes(units);
  }
  void write(std::span<const Run> runs, std::byte* out, std::byte* scratch,
             Stream stream) const override {
    check(api_,
          api_.topk_encode_runs(density_, values_, slot_bytes_, runs.data(), count(runs),
                                {.out = out}, scratch, stream),
          "encoding topk");
  }
  void read(std::span<const Run> runs, const Decoding& one, std::uint32_t* flags,
            Stream stream) const override {
    check(api_,
          api_.topk_decode_runs(slot_bytes_, values_, runs.data(), count(runs), one, flags, stream),
          "decoding topk");
  }

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

}  // namespace gradwire::cuda
