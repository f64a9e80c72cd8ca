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
  virtual ~Codec() = default;

  // Makes the GPU's version of a codec. Throws InvalidArgument for a codec without payloads, and
  // for one that is written in Python.
  static std::unique_ptr<const Codec> make(const Api& api, const codec::Codec& codec);

  // Returns a multiple of kPayloadAlignment.
  virtual std::size_t payload_bytes(std::uint64_t n) const { return layout(n).bytes(); }
  // Returns the bytes of a slot of a codec whose size varies, else 0.
  virtual std::size_t slot_bytes() const { return 0; }
  virtual Slotted layout(std::uint64_t) const { return {}; }
  // Returns whether the codec adapts, and so needs a KeyState even without feedback.
  virtual bool adapts() const { return false; }
  // Returns how much scratch memory prepare() and encode() need for extents of these lengths.
  virtual std::size_t scratch_bytes(std::span<const std::uint64_t> /*counts*/) const { return 0; }

  // Adapt the state. prepare() comes before the first encode() of a call, with the whole extent;
  // adapt() comes after the last one, with the number of elements of the whole key.
  virtual void prepare(const Run&, std::byte* /*scratch*/, Stream) const {}
  virtual void adapt(std::uint64_t /*n*/, KeyState*, Stream) const {}

  // Encode and decode many runs at once (cuda/api.h). Where encode() adds what was received, or
  // finishes, x is y.
  virtual void encode(std::span<const Run> runs, const Encoding& how, std::byte* scratch,
                      std::uint32_t* flags, Stream stream) const = 0;
  virtual void decode(std::span<const Run> runs, const Decoding& how, std::uint32_t* flags,
                      Stream stream) const = 0;

  // The same of one run.
  std::size_t scratch_bytes(std::uint64_t n) const {
    return scratch_bytes(std::span<const std::uint64_t>(&n, 1));
  }
  void encode(const Run& run, std::byte* out, std::byte* scratch, Stream stream) const {
    encode({&run, 1}, {.out = out}, scratch, nullptr, stream);
  }
  void decode(const std::byte* in, float* y, std::uint64_t n, bool add, std::uint32_t* flags,
              Stream stream) const {
    const Run run{.y = y, .n = n};
    decode({&run, 1}, {.payloads = {in, 0, 1}, .adds = add}, flags, stream);
  }

 protected:
  explicit Codec(const Api& api) : api_(api) {}
  const Api& api_;
};

}  // namespace gradwire::cuda
