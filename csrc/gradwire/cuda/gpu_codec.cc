// Binds a codec's parameters to the kernels of cuda/api.h. The arithmetic is that of codec/, so
// there is none here.
#include "gradwire/cuda/gpu_codec.h"

#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/blocks.h"
#include "gradwire/cuda/device.h"

namespace gradwire::cuda {
namespace {

using Kind = codec::Definition::Kind;

CastType cast_of(const codec::Definition& of) {
  return of.kind == Kind::kFp16 ? CastType::kFp16 : CastType::kBf16;
}

Values values_of(const codec::Definition& of) {
  using Of = codec::Definition::Values;
  if (of.values == Of::kTwoBits) return Values::kTwoBits;
  if (of.values == Of::kFp16) return Values::kFp16;
  return of.values == Of::kBf16 ? Values::kBf16 : Values::kFloat32;
}

}  // namespace

std::unique_ptr<const GpuCodec> GpuCodec::make(const Api& api, const codec::Codec& codec) {
  const Kind kind = codec.definition().kind;
  if (kind == Kind::kNone || kind == Kind::kLowRank || kind == Kind::kOther)
    throw InvalidArgument("codec '" + codec.name() + "' has no payloads on a GPU");
  return std::unique_ptr<const GpuCodec>(new GpuCodec(api, codec));
}

GpuCodec::GpuCodec(const Api& api, const codec::Codec& codec)
    : api_(api),
      of_(codec.definition()),
      unit_(codec.block()),
      slot_bytes_(codec.fixed_size() ? 0 : aligned(codec.max_bytes(unit_))) {}

std::size_t GpuCodec::payload_bytes(std::uint64_t n) const {
  if (slot_bytes_ > 0) return layout(n).bytes();
  if (of_.kind == Kind::kInt8) return aligned(codec::Int8Kernels::bytes(n, of_.block));
  if (of_.kind == Kind::kInt4) return aligned(codec::Int4Kernels::bytes(n, of_.block));
  return aligned(2 * n);
}

std::size_t GpuCodec::scratch_bytes(std::span<const std::uint64_t> counts) const {
  if (!is_sparse()) return 0;
  std::uint64_t units = 0;
  for (const std::uint64_t each : counts) units += units_of(each);
  return aligned(of_.kind == Kind::kTopK ? api_.topk_scratch_bytes(units)
                                         : api_.threshold_scratch_bytes(units));
}

void GpuCodec::prepare(const GpuSpan& span, std::byte* scratch, Stream stream) const {
  if (!adapts()) return;
  check(api_,
        api_.threshold_prepare(span.x, span.span_feedback, span.n, of_.density, scratch, stream),
        "preparing threshold");
}

void GpuCodec::adapt(std::uint64_t n, GpuKeyState* key_state, Stream stream) const {
  if (!adapts()) return;
  check(api_, api_.threshold_adapt(n, of_.density, key_state, stream), "adapting threshold");
}

// The sparse codecs' kernels neither add what was received nor finish, so that these are launches
// of their own.
void GpuCodec::encode(std::span<const GpuSpan> spans, const Encoding& how, std::byte* scratch,
                      std::uint32_t* flags, Stream stream) const {
  if (is_sparse() && how.received.count > 0) {
    std::vector<GpuSpan> all(spans.begin(), spans.end());
    for (GpuSpan& each : all) each.payload = each.received;
    decode(all, {.payloads = how.received, .adds = true}, flags, stream);
  }
  check(api_, start_encoding(spans, how, scratch, flags, stream), "encoding");
  if (is_sparse() && how.finishes)
    decode(spans, {.payloads = {how.out, 0, 1}, .factor = how.factor}, flags, stream);
}

// Those of the sparse codecs decode one payload each.
void GpuCodec::decode(std::span<const GpuSpan> spans, const Decoding& how, std::uint32_t* flags,
                      Stream stream) const {
  if (!is_sparse()) return check(api_, start_decoding(spans, how, flags, stream), "decoding");
  Decoding one = how;
  one.payloads.count = 1;
  for (int j = 0; j < how.payloads.count; ++j) {
    one.adds = how.adds || j > 0;
    one.factor = how.payloads.count == 1 ? how.factor : 1;
    one.payloads.first = how.payloads.first + how.payloads.offset(j);
    check(api_, start_decoding(spans, one, flags, stream), "decoding");
  }
  if (how.payloads.count == 1 || how.factor == 1) return;
  for (const GpuSpan& each : spans)
    check(api_, api_.scale(static_cast<int>(DType::kFloat32), each.y, how.factor, each.n, stream),
          "scaling");
}

Status GpuCodec::start_encoding(std::span<const GpuSpan> spans, const Encoding& how,
                                std::byte* scratch, std::uint32_t* flags, Stream stream) const {
  const GpuSpan* const first = spans.data();
  const auto all = static_cast<int>(spans.size());
  switch (of_.kind) {
    case Kind::kInt8:
      return api_.int8_encode_spans(of_.block, {of_.stochastic, of_.seed, 0, 0}, first, all, how,
                                    flags, stream);
    case Kind::kInt4:
      return api_.int4_encode_spans(of_.block, {of_.stochastic, of_.seed, 0, 0}, first, all, how,
                                    flags, stream);
    case Kind::kOneBit:
      return api_.onebit_encode_spans(of_.block, first, all, how, flags, stream);
    case Kind::kThreshold:
      return api_.threshold_encode_spans(of_.tau, of_.density, first, all, {.out = how.out},
                                         scratch, stream);
    case Kind::kTopK:
      return api_.topk_encode_spans(of_.density, values_of(of_), slot_bytes_, first, all,
                                    {.out = how.out}, scratch, stream);
    default:
      return api_.cast_encode_spans(cast_of(of_), of_.scale, first, all, how, flags, stream);
  }
}

Status GpuCodec::start_decoding(std::span<const GpuSpan> spans, const Decoding& how,
                                std::uint32_t* flags, Stream stream) const {
  const GpuSpan* const first = spans.data();
  const auto all = static_cast<int>(spans.size());
  switch (of_.kind) {
    case Kind::kInt8:
      return api_.int8_decode_spans(of_.block, first, all, how, flags, stream);
    case Kind::kInt4:
      return api_.int4_decode_spans(of_.block, of_.stochastic, first, all, how, flags, stream);
    case Kind::kOneBit:
      return api_.onebit_decode_spans(of_.block, first, all, how, flags, stream);
    case Kind::kThreshold:
      return api_.threshold_decode_spans(first, all, how, flags, stream);
    case Kind::kTopK:
      return api_.topk_decode_spans(slot_bytes_, values_of(of_), first, all, how, flags, stream);
    default:
      return api_.cast_decode_spans(cast_of(of_), of_.scale, first, all, how, flags, stream);
  }
}

}  // namespace gradwire::cuda
