// A codec on a GPU: the kernels of codec/codec.h's codecs, with the CPU's bytes and results.
//
// A payload of n elements takes payload_bytes(n). If a codec's size varies, each unit lies in a
// slot (cuda/api.h), so that the host need not know its length; a table in front has the lengths.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gradwire/codec/codec.h"
#include "gradwire/cuda/api.h"
#include "gradwire/cuda/messages/messages.h"

namespace gradwire::cuda {

class GpuCodec {
 public:
  // Makes the GPU's version of a codec. Throws InvalidArgument for a codec without payloads, and
  // for one that is written in Python.
  static std::unique_ptr<const GpuCodec> make(const Api& api, const codec::Codec& codec);

  // Returns a multiple of kPayloadAlignment.
  std::size_t payload_bytes(std::uint64_t n) const;
  // Return the bytes of a slot, 0 for codecs whose size does not vary; and the slots of n elements.
  std::size_t slot_bytes() const { return slot_bytes_; }
  Slotted layout(std::uint64_t n) const {
    return slot_bytes_ > 0 ? Slotted{units_of(n), slot_bytes_} : Slotted{};
  }
  // Returns whether the codec adapts, and so needs a GpuKeyState even without feedback.
  bool adapts() const { return of_.kind == Kind::kThreshold && of_.tau == 0; }
  // Returns the bytes of scratch memory that prepare() and encode() need for arrays of so many
  // elements.
  std::size_t scratch_bytes(std::span<const std::uint64_t> counts) const;
  std::size_t scratch_bytes(std::uint64_t n) const { return scratch_bytes({&n, 1}); }

  // Adapt the key's state; they do nothing for codecs that do not adapt. prepare() comes before the
  // first encode() of a call, with a whole array; adapt() comes after the last one, with the number
  // of elements of the whole key.
  void prepare(const GpuSpan& span, std::byte* scratch, Stream stream) const;
  void adapt(std::uint64_t n, GpuKeyState* key_state, Stream stream) const;

  // Encode and decode many spans at once (cuda/api.h). x must be y if encode() adds what was
  // received, or finishes. `flags` may be null.
  void encode(std::span<const GpuSpan> spans, const Encoding& how, std::byte* scratch,
              std::uint32_t* flags, Stream stream) const;
  void decode(std::span<const GpuSpan> spans, const Decoding& how, std::uint32_t* flags,
              Stream stream) const;

  // The same of one span.
  void encode(const GpuSpan& span, std::byte* out, std::byte* scratch, Stream stream) const {
    encode({&span, 1}, {.out = out}, scratch, nullptr, stream);
  }
  void decode(const std::byte* in, float* y, std::uint64_t n, bool add, std::uint32_t* flags,
              Stream stream) const {
    const GpuSpan span{.y = y, .n = n};
    decode({&span, 1}, {.payloads = {in, 0, 1}, .adds = add}, flags, stream);
  }

 private:
  using Kind = codec::Definition::Kind;

  GpuCodec(const Api& api, const codec::Codec& codec);
  bool is_sparse() const { return of_.kind == Kind::kThreshold || of_.kind == Kind::kTopK; }
  std::uint64_t units_of(std::uint64_t n) const { return (n + unit_ - 1) / unit_; }
  Status start_encoding(std::span<const GpuSpan> spans, const Encoding& how, std::byte* scratch,
                        std::uint32_t* flags, Stream stream) const;
  Status start_decoding(std::span<const GpuSpan> spans, const Decoding& how, std::uint32_t* flags,
                        Stream stream) const;

  const Api& api_;
  const codec::Definition of_;
  const std::size_t unit_, slot_bytes_;
};

}  // namespace gradwire::cuda
