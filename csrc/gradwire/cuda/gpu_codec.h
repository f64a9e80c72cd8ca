// A codec on a GPU: the kernels of codec/codec.h's codecs, with the CPU's bytes and results.
//
// A payload of n elements takes payload_bytes(n). Where a codec's size varies, its units lie in
// slots (cuda/api.h), so that nobody has to know their lengths; a table of sizes in front tells
// which of the bytes count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gradwire/codec/codec.h"
#include "gradwire/cuda/api.h"
#include "gradwire/cuda/messages/messages.h"

namespace gradwire::cuda {

class Codec {
 public:
  // Makes the GPU's version of a codec. Throws InvalidArgument for a codec without payloads, and
  // for one that is written in Python.
  static std::unique_ptr<const Codec> make(const Api& api, const codec::Codec& codec);

  // Returns a multiple of kPayloadAlignment.
  std::size_t payload_bytes(std::uint64_t n) const;
  // Returns the bytes of a slot of a codec whose size varies, else 0; and the slots of n elements.
  std::size_t slot_bytes() const { return slot_bytes_; }
  Slotted layout(std::uint64_t n) const {
    return slot_bytes_ > 0 ? Slotted{units_of(n), slot_bytes_} : Slotted{};
  }
  // Returns whether the codec adapts, and so needs a KeyState even without feedback.
  bool adapts() const { return of_.kind == Kind::kThreshold && of_.tau == 0; }
  // Returns how much scratch memory prepare() and encode() need for extents of these lengths.
  std::size_t scratch_bytes(std::span<const std::uint64_t> counts) const;
  std::size_t scratch_bytes(std::uint64_t n) const { return scratch_bytes({&n, 1}); }

  // Adapt the state. prepare() comes before the first encode() of a call, with the whole extent;
  // adapt() comes after the last one, with the number of elements of the whole key.
  void prepare(const Run& run, std::byte* scratch, Stream stream) const;
  void adapt(std::uint64_t n, KeyState* key_state, Stream stream) const;

  // Encode and decode many runs at once (cuda/api.h). Where encode() adds what was received, or
  // finishes, x is y.
  void encode(std::span<const Run> runs, const Encoding& how, std::byte* scratch,
              std::uint32_t* flags, Stream stream) const;
  void decode(std::span<const Run> runs, const Decoding& how, std::uint32_t* flags,
              Stream stream) const;

  // The same of one run.
  void encode(const Run& run, std::byte* out, std::byte* scratch, Stream stream) const {
    encode({&run, 1}, {.out = out}, scratch, nullptr, stream);
  }
  void decode(const std::byte* in, float* y, std::uint64_t n, bool add, std::uint32_t* flags,
              Stream stream) const {
    const Run run{.y = y, .n = n};
    decode({&run, 1}, {.payloads = {in, 0, 1}, .adds = add}, flags, stream);
  }

 private:
  using Kind = codec::Definition::Kind;

  Codec(const Api& api, const codec::Codec& codec);
  bool is_sparse() const { return of_.kind == Kind::kThreshold || of_.kind == Kind::kTopK; }
  std::uint64_t units_of(std::uint64_t n) const { return (n + unit_ - 1) / unit_; }
  Status start_encoding(std::span<const Run> runs, const Encoding& how, std::byte* scratch,
                        std::uint32_t* flags, Stream stream) const;
  Status start_decoding(std::span<const Run> runs, const Decoding& how, std::uint32_t* flags,
                        Stream stream) const;

  const Api& api_;
  const codec::Definition of_;
  const std::size_t unit_, slot_bytes_;
};

}  // namespace gradwire::cuda
