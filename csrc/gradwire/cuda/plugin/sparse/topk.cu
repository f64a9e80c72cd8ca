// topk (codec/topk.cc), encoded in one pass over x and e. A block keeps its unit of v in registers
// while it finds the largest elements. Where there are too few units for all multiprocessors,
// several blocks share a unit in that pass, and another kernel finds its largest elements.
#include "gradwire/cuda/plugin/block.cuh"
#include "gradwire/cuda/plugin/cast/cast.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/gpu.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"
#include "gradwire/cuda/plugin/sparse/sparse.cuh"
#include "gradwire/cuda/plugin/sparse/sparse_positions.cuh"
#include "gradwire/cuda/plugin/sparse/sparse_read.cuh"
#include "gradwire/cuda/plugin/sparse/sparse_select.cuh"

namespace gradwire::cuda {
namespace {

// ---- encode ------------------------------------------------------------------------------------

constexpr unsigned kStagedBytes = 16384;  // largest payload that is assembled in shared memory

// What is known of the groups of values in two bits.
struct GroupRoom {
  static constexpr unsigned kMost = kUnit / codec::TwoBits::kGroup;
  std::uint32_t exponent[kMost], sum[kMost], high_sum[kMost], high_count[kMost], split[kMost];
  float levels[kMost][2];
};

struct TopKRoom {
  GroupRoom groups;
  union {
    SelectRoom select;
    std::uint32_t before[kUnitWords];  // hits before each word
  };
  std::uint32_t hits[kUnitWords], ties[kUnitWords];
  PositionRoom positions;
  std::uint32_t payload[kStagedBytes / 4 + 2];
};
static_assert(kStagedBytes >= kMostPositionBytes + codec::TwoBits::bytes(kUnit));

// Returns the bits of `ties`, the thread's word, that are among the first `taken` ties of the unit.
__device__ std::uint32_t first_ties(std::uint32_t ties, unsigned taken) {
  const unsigned before = block_sums(static_cast<std::uint32_t>(__popc(ties))).before;
  const unsigned left = taken > before ? taken - before : 0;
  while (static_cast<unsigned>(__popc(ties)) > left)
    ties &= ~(1U << (31 - static_cast<unsigned>(__clz(static_cast<int>(ties)))));
  return ties;
}

// Sets the bits of the selected elements in room.hits, which may be read after a barrier. Where
// `zeros` is false, elements that are 0 are left out.
__device__ void mark_largest(TopKRoom& room, const float (&v)[kUnitSteps], unsigned steps,
                             const Selected& found, bool zeros) {
  const bool none = !zeros && found.magnitude == 0;      // whether no tie is sent
  const bool some = !none && found.taken < found.equal;  // whether only some of the ties are
#pragma unroll
  for (unsigned s = 0; s < kUnitSteps; ++s) {
    const std::uint32_t magnitude = magnitude_bits(v[s]);
    const bool inside = s < steps;
    const bool above = some || none ? magnitude > found.magnitude : magnitude >= found.magnitude;
    const unsigned hits = __ballot_sync(kAllLanes, inside && above);
    if (threadIdx.x % kWarp == 0) room.hits[mask_word(s)] = hits;
    if (!some) continue;
    const unsigned ties = __ballot_sync(kAllLanes, inside && magnitude == found.magnitude);
    if (threadIdx.x % kWarp == 0) room.ties[mask_word(s)] = ties;
  }
  if (!some) return;
  __syncthreads();
  room.hits[threadIdx.x] |= first_ties(room.ties[threadIdx.x], found.taken);
}

// Returns the number of the thread's hit in a step among the hits of the unit.
__device__ unsigned rank_of(const TopKRoom& room, unsigned step) {
  const unsigned word = mask_word(step);
  return room.before[word] + bits_before(room.hits[word]);
}

// ---- How values are sent ------------------------------------------------------------------------
// The values of `count` elements take bytes(count), value `rank` kBits from bit place(count, rank)
// on. `prepare` sees all values first.

template <typename As>
struct Alone {                          // each value by itself
  static constexpr bool kZeros = true;  // whether elements that are 0 are sent, too
  __device__ static unsigned bytes(unsigned count) { return As::kBits / 8 * count; }
  __device__ static unsigned place(unsigned, unsigned rank) { return As::kBits * rank; }
  __device__ static void prepare(TopKRoom&, const float (&)[kUnitSteps], unsigned, unsigned) {}
  __device__ static std::uint32_t narrow(const TopKRoom&, float v, unsigned) {
    return As::narrow(v);
  }
  __device__ static float lost(const TopKRoom&, float v, unsigned) {
    return As::lost(v, As::narrow(v));
  }
  __device__ static float read(Foreign in, unsigned, unsigned rank) {
    std::uint32_t bits = 0;
#pragma unroll
    for (unsigned b = 0; b < As::kBits / 8; ++b)
      bits |= in.byte(std::uint64_t{As::kBits / 8} * rank + b) << (8 * b);
    return As::widen(bits);
  }
};

struct AsFloat32 : Alone<AsFloat32> {
  using Alone<AsFloat32>::narrow, Alone<AsFloat32>::lost;
  static constexpr unsigned kBits = 32;
  __device__ static std::uint32_t narrow(float v) { return __float_as_uint(v); }
  __device__ static float widen(std::uint32_t bits) { return __uint_as_float(bits); }
  __device__ static float lost(float, std::uint32_t) { return 0; }
};

template <typename Half>
struct As16Bits : Alone<As16Bits<Half>> {
  using Alone<As16Bits<Half>>::narrow, Alone<As16Bits<Half>>::lost;
  static constexpr unsigned kBits = 16;
  // Narrows a finite value, limited to the largest that Half has.
  __device__ static std::uint32_t narrow(float v) {
    const float most = Half::kLargest;
    return Half::narrow_number(v > most ? most : v < -most ? -most : v);
  }
  __device__ static float widen(std::uint32_t bits) {
    return cuda::widen<Half>(static_cast<std::uint16_t>(bits));
  }
  __device__ static float lost(float v, std::uint32_t bits) { return v - widen(bits); }
};

// Values in two bits (codec/two_bits.h).
struct AsTwoBits {
  using Of = codec::TwoBits;
  using Level = As16Bits<GpuBf16>;
  static constexpr bool kZeros = false;
  static constexpr unsigned kBits = 2;
  static constexpr unsigned kGroup = Of::kGroup;

  __device__ static unsigned bytes(unsigned count) {
    return static_cast<unsigned>(Of::bytes(count));
  }
  __device__ static unsigned place(unsigned count, unsigned rank) {
    return 8 * static_cast<unsigned>(Of::level_bytes(count)) + kBits * rank;
  }
  // Finds the levels of all groups, and puts them into the payload from byte `at` on.
  __device__ static void prepare(TopKRoom& room, const float (&v)[kUnitSteps], unsigned count,
                                 unsigned at);
  // Returns the values of a group.
  __device__ static unsigned size_of(unsigned group, unsigned count) {
    const unsigned left = count - kGroup * group;
    return left < kGroup ? left : kGroup;
  }
  __device__ static bool is_high(const GroupRoom& groups, float v, unsigned group) {
    const std::uint32_t top = groups.exponent[group];
    return top >= Of::kLeastExponent && Of::in_units(__float_as_uint(v), top) > groups.split[group];
  }
  __device__ static std::uint32_t narrow(const TopKRoom& room, float v, unsigned rank) {
    return (is_high(room.groups, v, rank / kGroup) ? 2U : 0U) | (is_negative(v) ? 1U : 0U);
  }
  __device__ static float lost(const TopKRoom& room, float v, unsigned rank) {
    const unsigned group = rank / kGroup;
    const float level = room.groups.levels[group][is_high(room.groups, v, group) ? 1 : 0];
    return v - (is_negative(v) ? -level : level);
  }
  __device__ static float read(Foreign in, unsigned count, unsigned rank) {
    const unsigned bit = place(count, rank);
    const std::uint32_t code = in.byte(bit / 8) >> bit % 8;
    const unsigned level = 4 * (rank / kGroup) + (code & 2U);
    const float y = Level::widen(in.byte(level) | in.byte(level + 1) << 8);
    return (code & 1U) != 0 ? -y : y;
  }

 private:
  __device__ static void write_levels(TopKRoom& room, unsigned count, unsigned at);
};

// Calls body with the class that narrows and widens such values.
template <typename Body>
Status with_values(Values values, Body body) {
  if (values == Values::kTwoBits) return body(AsTwoBits{});
  if (values == Values::kFp16) return body(As16Bits<GpuFp16>{});
  if (values == Values::kBf16) return body(As16Bits<GpuBf16>{});
  return body(AsFloat32{});
}

// Calls body(value, group) for each of the thread's values that are sent.
template <typename Body>
__device__ void each_sent(const TopKRoom& room, const float (&v)[kUnitSteps], Body body) {
#pragma unroll
  for (unsigned s = 0; s < kUnitSteps; ++s)
    if (has_bit(room.hits[mask_word(s)])) body(v[s], rank_of(room, s) / AsTwoBits::kGroup);
}

// Makes the levels of the thread's group of their sums. Other threads may read them after a
// barrier.
__device__ void AsTwoBits::write_levels(TopKRoom& room, unsigned count, unsigned at) {
  GroupRoom& groups = room.groups;
  const unsigned group = threadIdx.x;
  if (group >= Of::groups(count)) return;
  const unsigned size = size_of(group, count);
  const bool tiny = groups.exponent[group] < Of::kLeastExponent;
  const std::uint32_t highs = groups.high_count[group], high_sum = groups.high_sum[group];
  const std::uint32_t sums[2] = {groups.sum[group] - high_sum, high_sum};
  const std::uint32_t counts[2] = {size - highs, highs};
  const float unit = tiny ? 0 : __uint_as_float(Of::unit(groups.exponent[group]));
  std::uint32_t both = 0;
  for (unsigned k = 0; k < 2; ++k) {
    const float mean = counts[k] == 0 ? 0 : static_cast<float>(sums[k] / counts[k]);
    const std::uint32_t narrowed = Level::narrow(mean * unit);
    groups.levels[group][k] = Level::widen(narrowed);
    both |= narrowed << (16 * k);
  }
  put_bits(room.payload, 8 * (at + 4 * group), both, 32);
}

__device__ void AsTwoBits::prepare(TopKRoom& room, const float (&v)[kUnitSteps], unsigned count,
                                   unsigned at) {
  GroupRoom& groups = room.groups;
  const unsigned mine = threadIdx.x;
  if (mine < GroupRoom::kMost)
    groups.exponent[mine] = groups.sum[mine] = groups.high_sum[mine] = groups.high_count[mine] = 0;
  __syncthreads();
  each_sent(room, v, [&](float each, unsigned group) {
    atomicMax(groups.exponent + group, Of::exponent(__float_as_uint(each)));
  });
  __syncthreads();
  each_sent(room, v, [&](float each, unsigned group) {
    const std::uint32_t top = groups.exponent[group];
    if (top >= Of::kLeastExponent)
      atomicAdd(groups.sum + group, Of::in_units(__float_as_uint(each), top));
  });
  __syncthreads();
  if (mine < Of::groups(count)) groups.split[mine] = groups.sum[mine] / size_of(mine, count);
  __syncthreads();
  each_sent(room, v, [&](float each, unsigned group) {
    if (!is_high(groups, each, group)) return;
    atomicAdd(groups.high_count + group, 1U);
    atomicAdd(groups.high_sum + group, Of::in_units(__float_as_uint(each), groups.exponent[group]));
  });
  __syncthreads();
  write_levels(room, count, at);
  __syncthreads();
}

// ---- encode, a block for each unit --------------------------------------------------------------

// Puts the values into shared memory, behind the positions: from byte `at` on.
template <typename As>
__device__ void stage_values(TopKRoom& room, const float (&v)[kUnitSteps], unsigned count,
                             unsigned at) {
#pragma unroll
  for (unsigned s = 0; s < kUnitSteps; ++s) {
    if (!has_bit(room.hits[mask_word(s)])) continue;
    const unsigned rank = rank_of(room, s);
    put_bits(room.payload, 8 * at + As::place(count, rank), As::narrow(room, v[s], rank),
             As::kBits);
  }
}

// Returns byte b of a value. For the lowest byte of an fp16, ptxas 13.0 would convert its number to
// an integer (F2I.U8.F16) if it saw a cast.
__device__ std::byte byte_of(std::uint32_t value, unsigned b) {
  return static_cast<std::byte>(__byte_perm(value, 0, 0x4440U + b));
}

// Writes the values to their places in the payload, byte by byte.
template <typename As>
__device__ void write_values(const TopKRoom& room, const float (&v)[kUnitSteps], std::byte* out) {
#pragma unroll
  for (unsigned s = 0; s < kUnitSteps; ++s) {
    if (!has_bit(room.hits[mask_word(s)])) continue;
    const unsigned rank = rank_of(room, s);
    const std::uint32_t value = As::narrow(room, v[s], rank);
    std::byte* at = out + As::kBits / 8 * rank;
#pragma unroll
    for (unsigned b = 0; b < As::kBits / 8; ++b) at[b] = byte_of(value, b);
  }
}

template <typename As>
__device__ void write_errors(const TopKRoom& room, const float (&v)[kUnitSteps], unsigned steps,
                             float* error) {
#pragma unroll
  for (unsigned s = 0; s < kUnitSteps; ++s) {
    if (s >= steps) continue;
    const bool sent = has_bit(room.hits[mask_word(s)]);
    const float left = sent ? As::lost(room, v[s], rank_of(room, s)) : v[s];
    error[element_of(s)] = is_finite(v[s]) ? left : 0;
  }
}

// Writes the payload of a unit, its largest elements as found. Returns its bytes.
template <typename As>
__device__ unsigned write_unit(TopKRoom& room, const float (&v)[kUnitSteps],
                               const BlockSource& source, const Selected& found, std::byte* out) {
  const unsigned n = source.n;
  clear(room.payload, kStagedBytes / 4 + 2);
  mark_largest(room, v, source.steps, found, As::kZeros);
  __syncthreads();
  const WrittenPositions positions =
      write_positions(room.hits[threadIdx.x], n, room.positions, room.payload);
  room.before[threadIdx.x] = positions.before;
  __syncthreads();
  const unsigned bytes = positions.bytes + As::bytes(positions.count);
  const bool staged = bytes <= kStagedBytes;  // always in two bits
  As::prepare(room, v, positions.count, positions.bytes);
  if (staged)
    stage_values<As>(room, v, positions.count, positions.bytes);
  else if constexpr (As::kBits % 8 == 0)
    write_values<As>(room, v, out + positions.bytes);
  __syncthreads();
  copy_out(room.payload, staged ? bytes : positions.bytes, out);
  return bytes;
}

__device__ unsigned write_not_finite(std::byte* out) {
  if (threadIdx.x == 0) *out = static_cast<std::byte>(head_of(codec::PositionFormat::kNotFinite));
  return 1;
}

template <typename As>
__global__ void __launch_bounds__(kUnitThreads, 1) encode(const __grid_constant__ SparseSpans of) {
  __shared__ TopKRoom room;
  of.spans.each_tile([&](Tile<GpuSpan> tile) {
    const SparseUnit unit{of, tile};
    const BlockSource source = unit.source();
    float* const error = unit.error();
    float v[kUnitSteps];
    source.load(0, v);
    bool finite = true;
#pragma unroll
    for (float each : v) finite = finite && is_finite(each);
    std::byte* const slot = unit.slot();
    unsigned bytes = 0;
    room.hits[threadIdx.x] = 0;
    if (__syncthreads_or(finite ? 0 : 1) == 0) {
      const Selected found =
          select_largest(source.n, unit.share(source.n), room.select, [&](auto see) {
#pragma unroll
            for (float each : v) see(__float_as_uint(each));
          });
      bytes = write_unit<As>(room, v, source, found, slot);
    } else {
      bytes = write_not_finite(slot);
    }
    if (error != nullptr) write_errors<As>(room, v, source.steps, error);
    if (threadIdx.x == 0) unit.write_size(bytes);
    __syncthreads();  // nobody reads the room any more
  });
}

// ---- encode, where blocks share a unit ----------------------------------------------------------

// What the blocks of a unit count in their parts: the elements of each first digit but 0. Two
// counts are in a word, and so is the sum of all parts.
struct UnitCounts {
  std::uint32_t of_part[kParts][kUnitThreads];
};
static_assert(2 * kUnitThreads == 1U << kFirstDigitBits && kUnit < 1U << 16);

// Counts digits and, where errors are kept, writes v to e'.
__global__ void __launch_bounds__(kUnitThreads, 2)
    count_parts(const __grid_constant__ SparseSpans of, UnitCounts* units) {
  __shared__ std::uint32_t counts[1U << kFirstDigitBits];
  each_part(of, [&](const SparseUnit& unit, std::uint64_t number, unsigned part) {
    const BlockSource source = unit.source();
    float* const error = unit.error();
    clear(counts, 1U << kFirstDigitBits);
    __syncthreads();
    float v[kPartSteps];
    source.load(part * kPartSteps, v);
#pragma unroll
    for (unsigned s = 0; s < kPartSteps; ++s) {
      const unsigned step = part * kPartSteps + s, digit = first_digit(magnitude_bits(v[s]));
      if (digit != 0) atomicAdd(counts + digit, 1U);
      if (error != nullptr && step < source.steps)
        error[element_of(step)] = is_finite(v[s]) ? v[s] : 0;
    }
    __syncthreads();
    units[number].of_part[part][threadIdx.x] = counts[2 * threadIdx.x] | counts[2 * threadIdx.x + 1]
                                                                             << 16;
    __syncthreads();  // nobody reads the counts any more
  });
}

// Adds up the counts of a unit's parts. Returns whether all of its elements are finite. The room
// may be read afterwards.
__device__ bool join_counts(SelectRoom& room, const UnitCounts& of) {
  std::uint32_t both = 0;
#pragma unroll
  for (unsigned part = 0; part < kParts; ++part) both += of.of_part[part][threadIdx.x];
  room.counts[2 * threadIdx.x] = both & 0xFFFFU;
  room.counts[2 * threadIdx.x + 1] = both >> 16;
  const bool finite = 2 * threadIdx.x < first_digit(kInfinityBits) || both == 0;
  return __syncthreads_or(finite ? 0 : 1) == 0;
}
static_assert(kInfinityBits % (2U << (2 * kDigitBits)) == 0);

// Writes the errors of the elements that are sent; those of the others are there.
template <typename As>
__device__ void write_sent_errors(const TopKRoom& room, const float (&v)[kUnitSteps],
                                  float* error) {
#pragma unroll
  for (unsigned s = 0; s < kUnitSteps; ++s)
    if (has_bit(room.hits[mask_word(s)]))
      error[element_of(s)] = As::lost(room, v[s], rank_of(room, s));
}

template <typename As>
__global__ void __launch_bounds__(kUnitThreads, 1)
    write_shared(const __grid_constant__ SparseSpans of, const UnitCounts* units) {
  __shared__ TopKRoom room;
  of.spans.each_tile([&](Tile<GpuSpan> tile) {
    const SparseUnit unit{of, tile};
    float* const error = unit.error();
    BlockSource source = unit.source();
    if (error != nullptr) source.x = error;
    source.residual = nullptr;
    float v[kUnitSteps];
    source.load(0, v);
    std::byte* const slot = unit.slot();
    unsigned bytes = 0;
    if (join_counts(room.select, units[tile.first + tile.number])) {
      const Selected found =
          select_counted(source.n, unit.share(source.n), room.select, [&](auto see) {
#pragma unroll
            for (float each : v) see(__float_as_uint(each));
          });
      bytes = write_unit<As>(room, v, source, found, slot);
      if (error != nullptr) write_sent_errors<As>(room, v, error);
    } else {
      bytes = write_not_finite(slot);
    }
    if (threadIdx.x == 0) unit.write_size(bytes);
    __syncthreads();  // nobody reads the room any more
  });
}

Status topk_encode_spans(double density, Values values, std::uint64_t slot_bytes,
                         const GpuSpan* spans, int count, const Encoding& how, void* scratch,
                         Stream stream) {
  if (how.received.count > 0 || how.finishes) return cudaErrorInvalidValue;
  auto* const counts = static_cast<UnitCounts*>(scratch);
  return in_sparse_batches(
      {{}, how.out, slot_bytes, density, 0, nullptr}, spans, count, [&](const SparseSpans& of) {
        const std::uint64_t tiles = of.spans.tiles();
        const bool shared = are_shared(tiles);
        if (shared)
          if (const Status status =
                  launch(count_parts, tiles * kParts, kUnitThreads, stream, of, counts);
              status != 0)
            return status;
        return with_values(values, [&](auto as) {
          using As = decltype(as);
          return shared ? launch(write_shared<As>, tiles, kUnitThreads, stream, of, counts)
                        : launch(encode<As>, tiles, kUnitThreads, stream, of);
        });
      });
}

std::size_t topk_scratch_bytes(std::uint64_t units) {
  return shared_units(units) * sizeof(UnitCounts);
}

// ---- decode ------------------------------------------------------------------------------------

// Reads what follows the positions of a unit: the values.
template <typename As>
class Largest {
 public:
  __device__ unsigned bytes(unsigned count) {
    count_ = count;
    return As::bytes(count);
  }
  __device__ bool open(Foreign in) {
    in_ = in;
    return true;
  }
  __device__ float at(unsigned rank) const { return As::read(in_, count_, rank); }

 private:
  Foreign in_{};
  unsigned count_ = 0;
};

Status topk_decode_spans(std::uint64_t slot_bytes, Values values, const GpuSpan* spans, int count,
                         const Decoding& how, std::uint32_t* flags, Stream stream) {
  return with_values(values, [&](auto as) {
    return decode_spans<Largest<decltype(as)>>(slot_bytes, spans, count, how, flags, stream);
  });
}

}  // namespace

void fill_topk(Api& api) {
  api.topk_encode_spans = topk_encode_spans;
  api.topk_scratch_bytes = topk_scratch_bytes;
  api.topk_decode_spans = topk_decode_spans;
}

}  // namespace gradwire::cuda
