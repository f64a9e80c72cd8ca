// Reads the payloads of units, which are not trusted: nothing beyond a unit's bytes is read,
// nothing beyond its elements is written, and what the CPU refuses (codec/sparse.cc) is refused.
#pragma once

#include <cmath>

#include "gradwire/cuda/plugin/block.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/sparse/sparse.cuh"

namespace gradwire::cuda {

// Untrusted bytes, of any alignment. Reads beyond their end give 0.
struct Foreign {
  const std::byte* data;
  std::uint64_t size;

  __device__ std::uint32_t byte(std::uint64_t at) const {
    return at < size ? static_cast<std::uint32_t>(data[at]) : 0;
  }
  __device__ std::uint32_t word(std::uint64_t at) const {
    return byte(at) | byte(at + 1) << 8 | byte(at + 2) << 16 | byte(at + 3) << 24;
  }
  __device__ Foreign from(std::uint64_t at) const {
    return at < size ? Foreign{data + at, size - at} : Foreign{data, 0};
  }
};

struct ReadRoom {
  std::uint32_t hits[kUnitWords];
  std::uint32_t before[kUnitWords];  // hits before each word
  std::uint64_t gap_bits;            // bits of the codes in a list of gaps
};

// What was read of a unit's positions; all threads have the same.
struct Read {
  bool refused;
  bool finite;
  unsigned count;       // the number of elements that were sent
  std::uint64_t bytes;  // the size of their positions
};

constexpr Read kRefusedUnit{true, true, 0, 0};

// ---- kList, kBitmap ----------------------------------------------------------------------------

__device__ inline void set_hit(ReadRoom& room, unsigned index) {
  atomicOr(room.hits + index / kWarp, 1U << index % kWarp);
}

__device__ inline Read read_list(Foreign in, std::uint64_t at, unsigned count, unsigned n,
                                 ReadRoom& room) {
  if (at + 2 * count > in.size) return kRefusedUnit;
  const auto index = [&](unsigned k) { return in.byte(at + 2 * k) | in.byte(at + 2 * k + 1) << 8; };
  bool wrong = false;
  for (unsigned k = threadIdx.x; k < count; k += kUnitThreads) {
    const bool fits = index(k) < n && (k == 0 || index(k - 1) < index(k));
    if (fits) set_hit(room, index(k));
    wrong = wrong || !fits;
  }
  if (__syncthreads_or(wrong ? 1 : 0) != 0) return kRefusedUnit;
  return {false, true, count, at + 2 * count};
}

// Returns the thread's word of the mask of a unit all of whose elements are sent.
__device__ inline std::uint32_t all_hits(unsigned n) {
  const unsigned first = threadIdx.x * kWarp;
  if (first >= n) return 0;
  return n - first >= kWarp ? ~0U : (1U << (n - first)) - 1;
}

// Reads a bitmap. Its elements are counted later, in read_positions().
__device__ inline Read read_bitmap(Foreign in, unsigned n, ReadRoom& room) {
  const unsigned bytes = (n + 7) / 8;
  if (1 + bytes > in.size) return kRefusedUnit;
  const Foreign map{in.data + 1, bytes};
  const std::uint32_t hits = map.word(4 * threadIdx.x);
  room.hits[threadIdx.x] = hits;
  if (__syncthreads_or((hits & ~all_hits(n)) != 0 ? 1 : 0) != 0) return kRefusedUnit;
  return {false, true, 0, 1U + bytes};
}

// ---- kGaps -------------------------------------------------------------------------------------
// A code ends `low` bits after its one bit. So where codes begin in a word depends on how many bits
// of a code, 0 to `low`, the words before it leave over. Each thread has one word, and computes how
// many bits it leaves over for each number left over before it; a scan composes these maps. Then
// every thread knows where its codes begin.
//
// If p is the position of the one bit of code k, all codes up to it have p - k · (1 + low) zeros.
// The code's index is these zeros << low, plus the low bits of all codes up to it, plus k.

// A map has sixteen fields of four bits: field b is the number of bits left over after a word that
// has b left over before it. This map is the identity.
constexpr std::uint64_t kSameLeft = 0xFEDCBA9876543210U;

__device__ inline unsigned left_after(std::uint64_t map, unsigned before) {
  return static_cast<unsigned>(map >> (4 * before)) & 15U;
}

// Calls body(place) for each one bit that ends the zeros of a code. Returns the bits left over.
template <typename Body>
__device__ unsigned each_code(std::uint32_t word, unsigned left, unsigned low, Body body) {
  unsigned at = left;
  while (at < kWarp && word >> at != 0) {
    at += static_cast<unsigned>(__ffs(static_cast<int>(word >> at))) - 1;
    body(at);
    at += 1 + low;
  }
  return at < kWarp ? 0 : at - kWarp;
}

__device__ inline std::uint64_t map_of(std::uint32_t word, unsigned low) {
  std::uint64_t map = 0;
  for (unsigned before = 0; before <= low; ++before)
    map |= std::uint64_t{each_code(word, before, low, [](unsigned) {})} << (4 * before);
  return map;
}

// How far a list of gaps has been read.
struct GapState {
  unsigned left;        // bits of a code left over
  std::uint32_t count;  // codes so far
  std::uint32_t rests;  // the sum of the codes' low bits
};

// The thread's word of codes, which is word `at` of the list.
struct GapWord {
  std::uint64_t at;
  std::uint32_t word, next;  // and the word after it
  unsigned low;

  __device__ std::uint32_t rest(unsigned place) const {
    const std::uint64_t both = std::uint64_t{next} << 32 | word;
    return static_cast<std::uint32_t>(both >> (place + 1)) & ((1U << low) - 1);
  }
};

// Sets the hits of the thread's codes, up to the first `count` codes of the unit. Returns whether
// they all lie in the unit. (Where bits are missing, the positions turn out longer than the
// payload, which decode_unit() refuses.)
__device__ inline bool take_gaps(const GapWord& word, GapState state, unsigned count, unsigned n,
                                 ReadRoom& room) {
  bool fits = true;
  each_code(word.word, state.left, word.low, [&](unsigned place) {
    if (state.count >= count) return;
    const std::uint64_t p = word.at * kWarp + place;
    state.rests += word.rest(place);
    const std::uint64_t zeros = p - std::uint64_t{state.count} * (1 + word.low);
    const std::uint64_t index = (zeros << word.low) + state.rests + state.count;
    if (index < n)
      set_hit(room, static_cast<unsigned>(index));
    else
      fits = false;
    if (++state.count == count) room.gap_bits = p + 1 + word.low;
  });
  return fits;
}

// Reads one word per thread, from word `first` on, and advances the state past them.
__device__ inline bool read_gap_words(Foreign in, std::uint64_t first, unsigned low, unsigned count,
                                      unsigned n, GapState& state, ReadRoom& room) {
  const std::uint64_t at = first + threadIdx.x;
  const bool any = 4 * at < in.size;
  const GapWord word{at, any ? in.word(4 * at) : 0, any ? in.word(4 * at + 4) : 0, low};
  const auto maps = block_scan(
      any ? map_of(word.word, low) : kSameLeft, kSameLeft, [=](std::uint64_t a, std::uint64_t b) {
        if (b == kSameLeft) return a;
        std::uint64_t both = 0;
        for (unsigned l = 0; l <= low; ++l)
          both |= std::uint64_t{left_after(b, left_after(a, l))} << (4 * l);
        return both;
      });
  GapState mine{any ? left_after(maps.before, state.left) : kWarp, 0, 0};
  each_code(word.word, mine.left, low, [&](unsigned place) {
    ++mine.count;
    mine.rests += word.rest(place);
  });
  const auto sums = block_sums(std::uint64_t{mine.count} << 32 | mine.rests);
  mine.count = state.count + static_cast<std::uint32_t>(sums.before >> 32);
  mine.rests = state.rests + static_cast<std::uint32_t>(sums.before);
  state = {left_after(maps.all, state.left),
           state.count + static_cast<std::uint32_t>(sums.all >> 32),
           state.rests + static_cast<std::uint32_t>(sums.all)};
  return take_gaps(word, mine, count, n, room);
}

__device__ inline Read read_gaps(Foreign in, std::uint64_t at, unsigned low, unsigned count,
                                 unsigned n, ReadRoom& room) {
  if (count == 0) return {false, true, 0, at};
  // Bytes beyond the most that the gaps of a unit can need are not read.
  const std::uint64_t most = ((n >> low) + std::uint64_t{count} * (1 + low)) / 8 + 1;
  Foreign codes = in.from(at);
  if (codes.size > most) codes.size = most;
  GapState state{0, 0, 0};
  bool fits = true;
  for (std::uint64_t first = 0; state.count < count && 4 * first < codes.size;
       first += kUnitThreads)
    fits = read_gap_words(codes, first, low, count, n, state, room) && fits;
  if (__syncthreads_or(fits ? 0 : 1) != 0 || state.count < count) return kRefusedUnit;
  return {false, true, count, at + (room.gap_bits + 7) / 8};
}

// ---- All layouts -------------------------------------------------------------------------------

// Reads the positions into room.hits, which is 0 before.
__device__ inline Read read_layout(Foreign in, unsigned n, ReadRoom& room) {
  using codec::PositionFormat;
  if (in.size == 0) return kRefusedUnit;
  const std::uint32_t head = in.byte(0), low = head >> kFormatBits;
  const auto format = static_cast<PositionFormat>(head & ((1U << kFormatBits) - 1));
  if (format > PositionFormat::kNotFinite ||
      low > (format == PositionFormat::kGaps ? kMostLowBits : 0))
    return kRefusedUnit;
  if (format == PositionFormat::kBitmap) return read_bitmap(in, n, room);
  if (format == PositionFormat::kAll) room.hits[threadIdx.x] = all_hits(n);
  if (format != PositionFormat::kList && format != PositionFormat::kGaps)
    return {false, format != PositionFormat::kNotFinite, format == PositionFormat::kAll ? n : 0, 1};
  const unsigned short_count = in.byte(1);
  const bool is_short = short_count < kShortCount;
  const unsigned count =
      is_short ? short_count : (short_count & (kShortCount - 1)) + kShortCount * in.byte(2);
  const std::uint64_t at = is_short ? 2 : 3;
  if (at > in.size || count > n) return kRefusedUnit;
  return format == PositionFormat::kList ? read_list(in, at, count, n, room)
                                         : read_gaps(in, at, low, count, n, room);
}

__device__ inline Read read_positions(Foreign in, unsigned n, ReadRoom& room) {
  room.hits[threadIdx.x] = 0;
  __syncthreads();
  Read read = read_layout(in, n, room);
  __syncthreads();
  const auto sums = block_sums(static_cast<std::uint32_t>(__popc(room.hits[threadIdx.x])));
  room.before[threadIdx.x] = sums.before;
  if (!read.refused) read.count = sums.all;
  __syncthreads();
  return read;
}

// ---- Values ------------------------------------------------------------------------------------

// y := the sent values, and 0 for the other elements; or y + these values. Returns whether the
// thread's values are finite.
template <typename Values>
__device__ bool put_values(const ReadRoom& room, const Values& values, unsigned n, float* y,
                           bool add, float factor) {
  constexpr unsigned kAtOnce = 4;
  const unsigned steps = steps_of(n);
  bool finite = true;
  for (unsigned first = 0; first < kUnitSteps; first += kAtOnce) {
    bool hit[kAtOnce];
    float value[kAtOnce], sum[kAtOnce];
#pragma unroll
    for (unsigned s = 0; s < kAtOnce; ++s) {
      const unsigned word = mask_word(first + s);
      hit[s] = has_bit(room.hits[word]);
      value[s] = hit[s] ? values.at(room.before[word] + bits_before(room.hits[word])) : 0;
      sum[s] = hit[s] && add ? y[element_of(first + s)] + value[s] : times(value[s], factor);
      finite = finite && magnitude_bits(value[s]) < kInfinityBits;
    }
#pragma unroll
    for (unsigned s = 0; s < kAtOnce; ++s)
      if (add ? hit[s] : first + s < steps) y[element_of(first + s)] = sum[s];
  }
  return finite;
}

__device__ inline void fill_nan(float* y, unsigned n) {
  for (unsigned i = threadIdx.x; i < n; i += kUnitThreads) y[i] = __uint_as_float(kNanBits);
}

// Decodes one unit. Returns the flags to set, which are the same in all threads; no thread reads
// the room after that.
template <typename Values>
__device__ std::uint32_t decode_unit(Foreign in, Values values, unsigned n, float* y, bool add,
                                     float factor, ReadRoom& room) {
  Read read = read_positions(in, n, room);
  const std::uint64_t bytes = read.bytes + values.bytes(read.count);
  read.refused = read.refused || bytes > in.size;
  if (!read.refused && read.count > 0) read.refused = !values.open(in.from(read.bytes));
  if (read.refused || !read.finite) {
    fill_nan(y, n);
    return read.refused ? kRefused : kNotFinite;
  }
  const bool finite = put_values(room, values, n, y, add, factor);
  return __syncthreads_or(finite ? 0 : 1) == 0 ? 0U : kNotFinite;
}

struct Decoder {
  Batch<GpuSpan> spans;
  std::uint64_t slot_bytes;
  Decoding how;
  std::uint32_t* flags;
};

// y := decoded · factor, or y + decoded.
template <typename Values>
__global__ void __launch_bounds__(kUnitThreads, 2)
    decode_units(const __grid_constant__ Decoder of) {
  __shared__ ReadRoom room;
  of.spans.each_tile([&](Tile<GpuSpan> tile) {
    const GpuSpan& span = tile.span;
    const std::byte* const slot = of.how.payloads.first + span.payload +
                                  sparse_table_bytes(span.n) + tile.number * of.slot_bytes;
    const std::uint32_t found =
        decode_unit(Foreign{slot, of.slot_bytes}, Values{}, unit_length(span.n, tile.number),
                    span.y + tile.number * kUnit, of.how.adds, of.how.factor, room);
    if (threadIdx.x == 0 && found != 0) set_flag(of.flags, found);
    __syncthreads();  // separates the registers of two units: without it the compiler spills
  });
}

template <typename Values>
Status decode_spans(std::uint64_t slot_bytes, const GpuSpan* spans, int count, const Decoding& how,
                    std::uint32_t* flags, Stream stream) {
  if (how.payloads.count != 1) return cudaErrorInvalidValue;
  return in_batches(spans, count, units_of_span, [&](const Batch<GpuSpan>& batch) {
    const Decoder of{batch, slot_bytes, how, flags};
    return launch(decode_units<Values>, batch.tiles(), kUnitThreads, stream, of);
  });
}

}  // namespace gradwire::cuda
