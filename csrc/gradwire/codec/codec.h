// A codec makes a span of float32 smaller on the wire. It is const and stateless, so any thread may
// use it: what it could not send, and what it adapts from call to call, belong to the caller
// (codec/feedback/feedback.h). Each codec's source file defines its arithmetic exactly, for every
// instruction set and for CUDA. Callers hold a FloatEnvironment (codec/simd/simd.h).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradwire/base/types.h"

namespace gradwire::codec {

// How payloads of a codec are summed.
enum class Combine : std::uint8_t {
  kPlain,     // bytes of the caller's own type: none, and lossless, which packs each message
  kReencode,  // decode, add in float32, encode again at every hop of an in-tree schedule; or gather
  kCompound,  // a short program of local work and plain all_reduces
};

// What codecs adapt to one array from call to call. Each codec has its own fields, so using another
// codec in between does not change them.
struct CodecState {
  float tau = 0;     // threshold's bound; 0: not chosen yet
  float filter = 0;  // topk's guess of its smallest value, which saves time; 0: none
  // What threshold has counted since prepare():
  std::uint64_t sent = 0;  // elements
  float largest = 0;       // the largest |v| of the blocks that are finite
};

// What encode() needs besides the values of a span.
struct EncodeContext {
  std::uint64_t call = 0;           // a number that no other call has, for random rounding
  std::uint64_t element = 0;        // index of the span's first element in its array
  const float* residual = nullptr;  // e of the span, added to it first; null: zero
  float* error = nullptr;           // e' of the span, which is written; null: not kept
  // Of the array, after prepare(); null: what it would hold is chosen from the span alone.
  CodecState* codec_state = nullptr;
  // e and e' in bfloat16, in place of the two above. codec/feedback/residuals.h converts them
  // before a codec's encode() sees the context.
  const std::uint16_t* narrow_residual = nullptr;
  std::uint16_t* narrow_error = nullptr;

  bool keeps() const noexcept { return error != nullptr || narrow_error != nullptr; }
  bool has_residual() const noexcept { return residual != nullptr || narrow_residual != nullptr; }
  float residual_at(std::size_t i) const noexcept {
    if (residual != nullptr) return residual[i];
    if (narrow_residual == nullptr) return 0;
    return std::bit_cast<float>(std::uint32_t{narrow_residual[i]} << 16);
  }
  // Returns the context of the rest of the span, from element `offset` on.
  EncodeContext from(std::size_t offset) const noexcept {
    EncodeContext later = *this;
    later.element += offset;
    if (residual != nullptr) later.residual += offset;
    if (error != nullptr) later.error += offset;
    if (narrow_residual != nullptr) later.narrow_residual += offset;
    if (narrow_error != nullptr) later.narrow_error += offset;
    return later;
  }
};

// The parameters of a codec, for kernels on other devices. Those that a kind does not have are
// unset.
struct Definition {
  enum class Kind : std::uint8_t {
    kNone,
    kFp16,
    kBf16,
    kInt8,
    kInt4,
    kOneBit,
    kThreshold,
    kTopK,
    kLowRank,
    kLossless,
    kOther,
  };
  enum class Values : std::uint8_t { kFloat32, kFp16, kBf16, kTwoBits };
  Kind kind = Kind::kOther;
  float scale = 1;                   // fp16
  std::size_t block = 0;             // int8, int4, onebit
  bool stochastic = false;           // int8, int4
  std::uint64_t seed = 0;            // int8, int4
  float tau = 0;                     // threshold; 0: it follows the density
  double density = 0;                // threshold, topk
  Values values = Values::kFloat32;  // topk
  std::size_t rank = 0;              // lowrank
};

// How long a codec takes in the built-in cost model, until `gradwire tune` has measured it: seconds
// of a processor per byte of the caller's array.
struct SecondsPerByte {
  double encode = 3e-10;
  double decode = 1e-10;
};

struct Decoded {
  std::size_t bytes = 0;  // consumed; more may follow
  bool finite = true;     // whether this payload stands for neither NaN nor Inf
};

// What is fixed when a codec is made.
struct Properties {
  std::string name;  // canonical, with parameters: make_codec(name)->name() == name
  Definition definition;
  Combine combine = Combine::kReencode;
  bool biased = false;     // whether losses do not average out without error feedback
  std::size_t block = 1;   // elements that are encoded together: spans are cut only at its
                           // multiples, counted from the start of each array
  bool fixed_size = true;  // whether n elements always take max_bytes(n)
  SecondsPerByte seconds_per_byte{};
};

class Codec {
 public:
  virtual ~Codec() = default;

  const std::string& name() const noexcept { return properties_.name; }
  const Definition& definition() const noexcept { return properties_.definition; }
  Combine combine() const noexcept { return properties_.combine; }
  bool biased() const noexcept { return properties_.biased; }
  std::size_t block() const noexcept { return properties_.block; }
  bool fixed_size() const noexcept { return properties_.fixed_size; }
  const SecondsPerByte& seconds_per_byte() const noexcept { return properties_.seconds_per_byte; }
  // Returns whether only what goes between sites is encoded: any codec that encodes sums anew takes
  // "between=sites".
  bool between_sites() const noexcept;
  // Returns whether an all_reduce of so many ranks should gather payloads rather than encode sums
  // anew.
  virtual bool gathers(int /*ranks*/) const noexcept { return false; }
  // Returns the most bytes that encode() writes for n elements.
  virtual std::size_t max_bytes(std::size_t n) const noexcept = 0;
  // Returns about how many bytes that are where few values are exactly 0: what calls are taken to
  // cost.
  virtual std::size_t usual_bytes(std::size_t n) const noexcept { return max_bytes(n); }

  // Adapt the state to an array of n elements: call prepare() before the first encode() of a call,
  // with the array as this rank passed it, and adapt() after the last. The defaults do nothing.
  virtual void prepare(const float* x, std::size_t n, const EncodeContext& context) const;
  virtual void adapt(std::size_t n, CodecState& codec_state) const;

  // Writes the payload of v[0, n) to `out`, where v = x + residual; returns its bytes. With y =
  // decode(out), error = v − y, and 0 where v is not finite. Finite v never decodes to NaN or Inf;
  // a span with NaN or Inf decodes to at least one, and Decoded::finite says so. x, residual and
  // error may not overlap, but residual and error may be the same memory. Throws InvalidArgument
  // where `out`, of any alignment, has less than max_bytes(n).
  std::size_t encode(const float* x, std::size_t n, const EncodeContext& context, Bytes out) const;

  // y := decoded, or y += decoded. `in` has any alignment and is not trusted: each length and index
  // is loaded once and checked. Throws InvalidArgument for an impossible one.
  Decoded decode(ConstBytes in, float* y, std::size_t n) const {
    return read(in, /*add=*/false, y, n);
  }
  Decoded decode_add(ConstBytes in, float* y, std::size_t n) const {
    return read(in, /*add=*/true, y, n);
  }
  // y := the sum of all payloads in their order, each of which must be consumed whole. Returns
  // `finite` of all and `bytes` of the first. The default decodes the first and adds the others.
  virtual Decoded decode_sum(std::span<const ConstBytes> payloads, float* y, std::size_t n) const;

 protected:
  explicit Codec(Properties properties) : properties_(std::move(properties)) {}

  // encode(), decode() and decode_add() of the codec. `out` has room for max_bytes(n).
  virtual std::size_t write(const float* x, std::size_t n, const EncodeContext& context,
                            std::byte* out) const = 0;
  virtual Decoded read(ConstBytes in, bool add, float* y, std::size_t n) const = 0;

 private:
  const Properties properties_;
};

// Treats values that are not finite, in a finished sum that nobody encodes, as the codec's encoder
// would: codecs that send element by element (block 1) pass Inf on, with all others the whole block
// becomes NaN. `y` must begin at the start of a block. Returns whether all of it is finite.
bool mark_not_finite(const Codec& codec, float* y, std::size_t n) noexcept;

// Makes a codec from "none", "fp16", "fp16:scale=1024", "bf16": a name, then key=value pairs
// between commas. An unknown name or parameter throws InvalidArgument that lists the known ones.
std::shared_ptr<const Codec> make_codec(std::string_view spec);
std::vector<std::string_view> codec_names();

}  // namespace gradwire::codec
