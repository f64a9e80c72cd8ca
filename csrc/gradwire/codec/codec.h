// A codec makes a run of float32 smaller on the wire. It is const and stateless: what it could not
// send, and what it adapts from call to call, belong to the caller (codec/feedback/feedback.h). The
// exact arithmetic of each codec is defined in its source file: one definition for every
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
  kPlain,     // bytes of the caller's own type: none
  kReencode,  // decode, add in float32, encode again at every hop of an in-tree schedule; or gather
  kCompound,  // a short program of local work and plain all_reduces
};

// What codecs adapt to one extent from call to call. Each codec has its own fields, so using
// another codec in between does not change them.
struct CodecState {
  float tau = 0;     // of threshold; 0: not chosen yet
  float filter = 0;  // of topk; 0: not chosen yet
  // Of threshold, since prepare():
  std::uint64_t sent = 0;  // elements
  float largest = 0;       // |v| of what was encoded, finite units only
};

// What encode() needs besides the values of a run: its position in the job, error feedback, and
// state.
struct EncodeContext {
  std::uint64_t call = 0;           // unique for each call, for random rounding
  std::uint64_t element = 0;        // index of the run's first element in its extent
  const float* residual = nullptr;  // e of the run, added to it first; null: zero
  float* error = nullptr;           // e' of the run: written; null: not kept
  CodecState* codec_state =
      nullptr;  // of the run's extent, after prepare(); null: chosen from the run alone
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
  // Returns the context of the part of the run that begins `offset` elements later.
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
    kOneBit,
    kThreshold,
    kTopK,
    kLowRank,
    kOther,
  };
  Kind kind = Kind::kOther;
  float scale = 1;            // fp16
  std::size_t block = 0;      // int8, onebit
  bool stochastic = false;    // int8
  std::uint64_t seed = 0;     // int8
  float tau = 0;              // threshold; 0: it follows the density
  double density = 0;         // threshold, topk
  Kind values = Kind::kNone;  // topk: float32, or fp16, or bf16
  std::size_t rank = 0;       // lowrank
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
  std::size_t unit() const noexcept { return properties_.block; }
  bool fixed_size() const noexcept { return properties_.fixed_size; }
  const SecondsPerByte& seconds_per_byte() const noexcept { return properties_.seconds_per_byte; }
  // Returns whether an all_reduce of so many ranks should gather payloads rather than encode sums
  // anew.
  virtual bool gathers(int /*ranks*/) const noexcept { return false; }
  // Returns the most bytes that encode() writes for n elements.
  virtual std::size_t max_bytes(std::size_t n) const noexcept = 0;
  // Returns about how many bytes that are where few values are exactly 0: what calls are taken to
  // cost.
  virtual std::size_t usual_bytes(std::size_t n) const noexcept { return max_bytes(n); }

  // Adapt the state: prepare() comes before the first encode() of a call, with the whole extent as
  // this rank passed it, and adapt() after the last. The defaults adapt nothing.
  virtual void prepare(const float* x, std::size_t n, const EncodeContext& context) const;
  virtual void adapt(std::size_t n, CodecState& codec_state) const;

  // Writes v[0, n) to out, where v = x + residual; returns the bytes written. With y = decode(out),
  // error = v − y, and 0 where v is not finite. Finite v never decodes to NaN or Inf; a run
  // with NaN or Inf decodes to at least one NaN or Inf, and says so in Decoded::finite. x, residual
  // and error may not overlap, but residual and error may be the same. `out` holds at least
  // max_bytes(n), at any alignment, or InvalidArgument is thrown.
  virtual std::size_t encode(const float* x, std::size_t n, const EncodeContext& context,
                             Bytes out) const = 0;

  // y := decoded, or y += decoded. `in` has any alignment and is not trusted: each length and index
  // is checked, and loaded once; an impossible one throws InvalidArgument.
  virtual Decoded decode(ConstBytes in, float* y, std::size_t n) const = 0;
  virtual Decoded decode_add(ConstBytes in, float* y, std::size_t n) const = 0;
  // y := the sum of all payloads in their order, each of which must be consumed whole. Returns
  // `finite` of all and `bytes` of the first. The default decodes the first and adds the others.
  virtual Decoded decode_sum(std::span<const ConstBytes> payloads, float* y, std::size_t n) const;

 protected:
  explicit Codec(Properties properties) : properties_(std::move(properties)) {}

 private:
  const Properties properties_;
};

// Treats values that are not finite, in a finished sum that nobody encodes, as the codec's encoder
// would: codecs that send element by element (unit 1) pass Inf on, with all others the whole unit
// becomes NaN. `y` must begin at the start of a unit. Returns whether all of it is finite.
bool mark_not_finite(const Codec& codec, float* y, std::size_t n) noexcept;

// Makes a codec from "none", "fp16", "fp16:scale=1024", "bf16": a name, then key=value pairs
// between commas. An unknown name or parameter throws InvalidArgument that lists the known ones.
std::shared_ptr<const Codec> make_codec(std::string_view spec);
std::vector<std::string_view> codec_names();

}  // namespace gradwire::codec
