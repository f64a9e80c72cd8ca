// A codec makes a run of float32 smaller on the wire. It is const and stateless; what it could not
// send goes to the caller's error vector (codec/feedback.h). The exact arithmetic of each codec is
// defined in its source file: one definition for every instruction set and for CUDA. Callers hold a
// FloatEnvironment (codec/simd.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/base/types.h"

namespace gradwire::codec {

// How payloads of a codec are summed (contracts 2).
enum class Combine : std::uint8_t {
  kPlain,     // bytes of the caller's own type: none
  kReencode,  // decode, add in float32, encode again at every hop; in-tree schedules only
  kGather,    // encode once, all-gather the payloads, add in rank order
  kCompound,  // a short program of local work and plain all_reduces
};

// Where in the job a run stands, for rounding that is random but reproducible.
struct Position {
  std::uint64_t call = 0;     // operation number
  std::uint64_t element = 0;  // index of the run's first element in its extent
};

class Codec {
 public:
  virtual ~Codec() = default;

  // Canonical, with parameters: make_codec(name())->name() == name().
  virtual std::string name() const = 0;
  virtual Combine combine() const noexcept = 0;
  // Losses do not average out without error feedback.
  virtual bool biased() const noexcept = 0;
  // Elements. Runs are cut at multiples of it, counted from the start of each extent.
  virtual std::size_t unit() const noexcept = 0;
  // The most bytes that encode() writes for n elements; exactly that many when fixed_size().
  virtual std::size_t max_bytes(std::size_t n) const noexcept = 0;
  virtual bool fixed_size() const noexcept { return true; }

  // Writes x[0, n) to out, returns the bytes written. With y = decode(out): error[i] += x[i] - y[i]
  // where error is not null and x[i] is finite. Finite input never decodes to Inf; NaN or Inf
  // decodes to NaN or Inf. `out` holds at least max_bytes(n), at any alignment, or InvalidArgument
  // is thrown.
  virtual std::size_t encode(const float* x, std::size_t n, Position at, float* error,
                             Bytes out) const = 0;

  // y := decoded, or y += decoded. Returns the bytes consumed; more may follow. `in` has any
  // alignment and is hostile: each length and index is checked, and loaded once; an impossible one
  // throws InvalidArgument.
  virtual std::size_t decode(ConstBytes in, float* y, std::size_t n) const = 0;
  virtual std::size_t decode_add(ConstBytes in, float* y, std::size_t n) const = 0;

  // The step of a middle rank in one pass: sum := decode(in) + x, encoded to out, its error booked
  // like encode's. x is left as it is. The default decodes into `scratch` (n floats).
  virtual std::size_t fold_encode(ConstBytes in, const float* x, std::size_t n, Position at,
                                  float* error, float* scratch, Bytes out) const;
};

// "none", "fp16", "fp16:scale=1024", "bf16": a name, then key=value pairs between commas. An
// unknown name or parameter throws InvalidArgument that lists the known ones.
std::shared_ptr<const Codec> make_codec(std::string_view spec);
std::vector<std::string_view> codec_names();

}  // namespace gradwire::codec
