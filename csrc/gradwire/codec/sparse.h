// What the sparse codecs share: which elements of a block are sent, how their positions travel, and
// the selection of the largest.
//
// A payload holds one record per block, which can be decoded alone. A record begins with
//   1 byte   bits 0-2 PositionFormat, bits 3-6 low bits of a gap (kGaps, else 0), bit 7 zero
//   kList    count, then 2 bytes an index
//   kGaps    count, then for each index the gap to the one before it, less 1, in Golomb-Rice code:
//            gap >> low zero bits, a one bit, the low bits; first bit lowest, padded to whole bytes
//   kBitmap  1 bit an element of the block, first bit lowest, padded to whole bytes
//   kAll     nothing: every element is sent
//   kNone, kNotFinite  nothing, and nothing follows: no element is sent; all of the block is NaN
// where count is 1 byte below 128, else 2: (low 7 bits | 128), the rest. Positions take the format
// with the fewest bytes, the first listed of equal ones, and the lowest `low` of the best. Numbers
// are little-endian. What the codec says of each element that is sent follows.
//
// A block has 32,768 elements. Where rows differ in scale as e^N(0, 1) does, top-k by blocks of
// 8,192, 32,768 and 131,072 catches 36, 68 and 90 % of the squares that one top-k of all elements
// does at density 0.001, and 71, 94 and 99 % at 0.01 (kernels_sparse.cc). Smaller blocks balance
// chunks better, and a block and its payload should fit the L2 cache.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gradwire/base/types.h"
#include "gradwire/codec/blocks.h"
#include "gradwire/codec/codec.h"

namespace gradwire::codec {

// When gathering pays, for p ranks that each send `density` of all elements. Gathering delivers up
// to p · density for p - 1 payloads of each rank. Encoding at each hop delivers a density's worth
// of the sums for two parts of (p - 1) / p payloads: half as much per byte. But the bytes of
// gathering grow with p, so it pays only while what the others send is small beside the dense
// array. Two ranks send as much either way, and lose less by gathering.
inline constexpr int kGatheringRanks = 16;
inline constexpr double kGatheredShare = 1.0 / 16;  // of all elements, from all other ranks
constexpr bool worth_gathering(int ranks, double density) noexcept {
  if (ranks <= 2) return true;
  return ranks <= kGatheringRanks && (ranks - 1) * density <= kGatheredShare;
}

enum class PositionFormat : std::uint8_t { kNone, kList, kGaps, kBitmap, kAll, kNotFinite };

// Ascending indices within a block.
struct Positions {
  std::array<std::uint16_t, kSparseBlock> index;
  std::size_t count = 0;

  std::span<const std::uint16_t> all() const { return {index.data(), count}; }
  void take(const HitMask& hits, std::size_t n);
  template <typename Unwanted>
  void drop(Unwanted unwanted) {
    const auto end = index.begin() + static_cast<std::ptrdiff_t>(count);
    count = static_cast<std::size_t>(std::remove_if(index.begin(), end, unwanted) - index.begin());
  }
};

// Returns the most bytes that write_positions() needs for n elements.
constexpr std::size_t most_position_bytes(std::size_t n) { return 1 + (n + 7) / 8; }
std::size_t write_positions(std::span<const std::uint16_t> index, std::size_t n, std::byte* out);
std::size_t write_not_finite(std::byte* out);

// Reads untrusted bytes from front to back.
class PayloadReader {
 public:
  explicit PayloadReader(ConstBytes in) : left_(in) {}
  // Returns the next bytes. Throws InvalidArgument where fewer are left.
  ConstBytes take(std::size_t bytes);
  std::uint8_t byte() { return std::to_integer<std::uint8_t>(take(1)[0]); }
  std::size_t left() const { return left_.size(); }
  // Reads positions. Throws InvalidArgument unless they are below n and strictly ascending.
  PositionFormat positions(std::size_t n, Positions& out);

 private:
  std::size_t count();
  void list(std::size_t n, Positions& out);
  void gaps(unsigned low, std::size_t n, Positions& out);
  void bitmap(std::size_t n, Positions& out);

  ConstBytes left_;
};

// A run of at most one block of v = x + residual.
struct SparseSource {
  const float* x;
  const float* residual;  // may be null
  std::size_t n;

  float operator[](std::size_t i) const { return residual == nullptr ? x[i] : x[i] + residual[i]; }
};

// A codec that sends only some elements of each block. A class that derives from it defines what
// follows a block's positions.
class SparseCodec : public Codec {
 public:
  std::size_t max_bytes(std::size_t n) const noexcept final;
  // What reaches a given τ is unknown, so its density is taken to be 1.
  bool gathers(int ranks) const noexcept final {
    return worth_gathering(ranks, definition().tau > 0 ? 1 : definition().density);
  }

 protected:
  SparseCodec(const std::string& name, const Definition& definition, SecondsPerByte seconds);
  std::size_t write(const float* x, std::size_t n, const EncodeContext& context,
                    std::byte* out) const override;

 private:
  virtual std::size_t most_bytes(std::size_t n) const noexcept = 0;  // of n elements of one block
  // Encodes one block; `state` is null where there is none. Returns the bytes written.
  virtual std::size_t encode_block(SparseSource block, float* error, CodecState* state,
                                   std::byte* out) const = 0;
  // Reads what follows a block's positions, and adds it to y or (`add` is false) puts it in place
  // of zeros there. Returns whether all of it is finite.
  virtual bool read_values(PayloadReader& reader, const Positions& positions, bool add,
                           float* y) const = 0;
  Decoded read(ConstBytes in, bool add, float* y, std::size_t n) const final;
};

// Returns how many of n elements a density stands for: rounded, at least one.
std::size_t share_of(double density, std::size_t n) noexcept;

// Clears the errors that are not finite, of a block that holds NaN or Inf; `error` may be null.
void clear_not_finite(float* error, std::size_t n);

// Returns the bits of |x|, which compare as magnitudes do.
std::uint32_t magnitude_bits(float x) noexcept;
constexpr std::uint32_t kInfinityBits = 0x7F800000U;

// What a thread needs to work on a block, too large for its stack.
struct SparseScratch {
  HitMask hits;
  Positions positions;
  std::array<std::uint64_t, kSparseBlock> ranks, order;
  std::array<float, kSparseBlock> values, errors;

  static SparseScratch& mine();
};

// Writes the positions of the block's k largest |v|, ties to the lower index, to scratch.positions,
// and v itself to `keep`, which may be null or the residual. Returns the smallest magnitude among
// the k, or kInfinityBits or more where v is not all finite. `filter` is a guess of that magnitude,
// 0 for none: it decides how long this takes and nothing else, and becomes a guess for the next
// block.
std::uint32_t select_largest(SparseSource block, std::size_t k, float* keep, float& filter,
                             SparseScratch& scratch);

}  // namespace gradwire::codec
