// onebit's encoder (codec/onebit.cc defines it). A warp holds 1024 elements of a block in
// registers. A lane has 32 of them: those that the definition's lane sums. So neighbouring lanes
// load and store neighbouring elements, whatever the alignment, and a ballot gives a word of signs.
#include "gradwire/cuda/plugin/bits.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/onebit.cuh"
#include "gradwire/cuda/plugin/run_feedback.cuh"
#include "gradwire/cuda/plugin/share.cuh"
#include "gradwire/cuda/plugin/team.cuh"

namespace gradwire::cuda {
namespace {

using namespace onebit;

struct Encoding {
  const float* x;
  RunFeedback run_feedback;
  std::uint64_t n, block, slot_bytes;
  std::byte* out;
  std::uint32_t* sizes;  // may be null
  float* y;              // this and the rest: for onebit_finish()
  float factor;
  std::uint32_t* flags;
};

// ---- Means -------------------------------------------------------------------------------------

// A lane's sums of the values of each sign.
struct SignSums {
  float plus, minus;

  __device__ void add(float v) {
    if (is_negative(v))
      minus = minus + v;
    else
      plus = plus + v;
  }
};

// Adds up a block's values times `scale` over all its warps: each warp continues the sums of the
// one before it.
template <bool kAlone>
__device__ SignSums add_up(const float (&v)[kCount], float scale, Team<kAlone> team) {
  SignSums sums{0, 0};
  const auto add_own = [&] {
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) sums.add(v[i] * scale);
  };
  if constexpr (kAlone) {
    add_own();
  } else {
    __shared__ SignSums of_lane[kWarp];
    for (unsigned turn = 0; turn < team.warps(); ++turn) {
      if (team.warp() == turn) {
        if (turn > 0) sums = of_lane[team.lane()];
        add_own();
        of_lane[team.lane()] = sums;
      }
      __syncthreads();
    }
    sums = of_lane[team.lane()];
    __syncthreads();  // before of_lane is written again
  }
  for (int by = kWarp / 2; by > 0; by /= 2) {
    sums.plus = sums.plus + __shfl_xor_sync(kAllLanes, sums.plus, by);
    sums.minus = sums.minus + __shfl_xor_sync(kAllLanes, sums.minus, by);
  }
  return sums;
}

struct Means {
  float plus, minus;

  __device__ static Means of(SignSums sums, std::uint32_t positives, std::uint32_t negatives) {
    return {positives == 0 ? 0 : sums.plus / static_cast<float>(positives),
            negatives == 0 ? 0 : sums.minus / static_cast<float>(negatives)};
  }
  __device__ bool finite() const { return is_finite(plus) && is_finite(minus); }
};

constexpr float kHugeScale = 0x1p-24F;

// Returns a block's means, limited to finite floats, from the means of its values times kHugeScale.
// Sums of values so scaled are finite.
__device__ Means limited(Means scaled) {
  constexpr float kLimit = 0x1.FFFFFEp127F * kHugeScale;
  const float plus = scaled.plus < kLimit ? scaled.plus : kLimit;
  const float minus = scaled.minus > -kLimit ? scaled.minus : -kLimit;
  return {plus / kHugeScale, minus / kHugeScale};
}

// ---- Masks -------------------------------------------------------------------------------------

// A team's shared memory for mask and signs.
template <bool kAlone>
struct BitRoom {
  static constexpr unsigned kWords = 2 * kWarp * (kAlone ? 1 : kMostWarps) + 1;
  std::uint32_t words[kWords];
};

// The ends of a mask's runs in the thread's word of it.
struct RunEnds {
  std::uint32_t ends;    // a bit for each run that ends in this word
  std::uint32_t first;   // bits of the mask before this word
  std::uint32_t begins;  // where the first of these runs begins, plus 1; 0 for the mask's first

  // Calls visit(length) for each of these runs in order.
  template <typename Visit>
  __device__ void each(Visit visit) const {
    std::uint32_t begin = begins;
    for (std::uint32_t left = ends; left != 0; left &= left - 1) {
      const std::uint32_t end = first + static_cast<std::uint32_t>(__ffs(static_cast<int>(left)));
      visit(end - begin);
      begin = end;
    }
  }
};

struct MaskWritten {
  std::uint32_t bytes;      // of mask and signs
  std::uint32_t negatives;  // among those that are sent
  bool has_runs;            // in place of a bitmap
};

// Replaces the mask in the room by its runs where these take fewer bytes. Returns their bytes; or
// 0, and leaves the mask.
template <bool kAlone>
__device__ std::uint32_t write_runs(std::uint32_t present, std::uint32_t n, Team<kAlone> team,
                                    BitRoom<kAlone>& room) {
  const unsigned rank = team.rank();
  const std::uint32_t before = rank == 0 ? 0 : room.words[rank - 1] >> 31;
  RunEnds runs{(present ^ (present << 1 | before)) & word_of_first(n, rank), 32 * rank, 0};
  const std::uint32_t last_end =
      runs.ends == 0
          ? 0
          : runs.first + 32 - static_cast<std::uint32_t>(__clz(static_cast<int>(runs.ends)));
  const auto ends = team.scan(last_end, Larger{});
  runs.begins = ends.before;
  std::uint32_t size = 0;
  runs.each([&](std::uint32_t length) { size += run_size(length); });
  const auto sizes = team.scan(size, Plus{});
  const std::uint32_t last = n + 1 - ends.all, bits = sizes.all + run_size(last);
  team.sync();  // all threads have read their neighbour's word
  if (bits > 8 * most_run_bytes(n)) return 0;
  room.words[rank] = 0;
  team.sync();
  std::uint32_t at = sizes.before;
  runs.each([&](std::uint32_t length) {
    put_bits(room.words, at, run_code(length), run_size(length));
    at += run_size(length);
  });
  if (rank == 0) put_bits(room.words, sizes.all, run_code(last), run_size(last));
  return bytes_of_bits(bits);
}

// Writes mask and signs, of each of which the thread has a word.
template <bool kAlone>
__device__ MaskWritten write_mask(std::uint32_t signs, std::uint32_t present, std::uint32_t n,
                                  Team<kAlone> team, BitRoom<kAlone>& room, std::byte* out) {
  const unsigned rank = team.rank();
  signs &= present;
  for (unsigned i = rank; i < room.kWords; i += team.size())
    room.words[i] = i == rank ? present : 0;
  team.sync();
  const std::uint32_t run_bytes = write_runs(present, n, team, room);
  const std::uint32_t mask_bytes = run_bytes > 0 ? run_bytes : bytes_of_bits(n);
  const auto count = static_cast<std::uint32_t>(__popc(present));
  const auto counts = team.scan(count, Plus{});
  put_bits(room.words, 8 * mask_bytes + counts.before, compress(signs, present), count);
  team.sync();
  const std::uint32_t bytes = mask_bytes + bytes_of_bits(counts.all);
  auto* const target = reinterpret_cast<std::uint32_t*>(out);
  for (unsigned i = rank; 4 * i < bytes; i += team.size()) target[i] = room.words[i];
  const std::uint32_t negatives = team.sum(static_cast<std::uint32_t>(__popc(signs)));
  team.sync();  // before the room is written again
  return {bytes, negatives, run_bytes > 0};
}

// ---- Blocks ------------------------------------------------------------------------------------

template <bool kFeedsBack, bool kFinishes, bool kAlone>
struct Block {
  static constexpr bool kLooksTwice = kFeedsBack || kFinishes;

  const Encoding& of;
  Feedback feedback;
  Team<kAlone> team;
  Share<kWarp, kCount, 1> share;
  BitRoom<kAlone>& room;

  std::uint64_t begin;   // of this thread's segment, in the run
  std::uint32_t n;       // elements of the block
  std::uint32_t inside;  // elements from the segment's first to the block's last
  std::byte* out;

  __device__ void load(float (&v)[kCount]) const {
    share.load(of.x + begin, inside, v);
    if constexpr (kFeedsBack) {
      float e[kCount];
      share.load(feedback.before + begin, inside, e);
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i) v[i] = v[i] + e[i];
    }
  }

  // Returns the thread's word of the bits that the predicate gives for the block's elements.
  template <typename Predicate>
  __device__ std::uint32_t word_of(const float (&v)[kCount], Predicate predicate) const {
    std::uint32_t mine = 0;
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const std::uint32_t word = __ballot_sync(kAllLanes, predicate(v[i]));
      if (i == team.lane()) mine = word;
    }
    return mine;
  }

  __device__ bool finite(const float (&v)[kCount]) const {
    bool all = true;
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) all = all && is_finite(v[i]);
    return !team.any(!all);
  }

  __device__ void write_words(std::uint32_t mine) const {
    if (32 * team.rank() < n) reinterpret_cast<std::uint32_t*>(out + kHeader)[team.rank()] = mine;
  }
  __device__ void write_header(Means means, std::uint32_t bytes, std::uint64_t unit) const {
    if (team.rank() > 0) return;
    auto* const header = reinterpret_cast<float*>(out);
    header[0] = means.plus;
    header[1] = means.minus;
    if (of.sizes != nullptr) of.sizes[unit] = kHeader + bytes;
  }

  __device__ void encode(std::uint64_t unit) const {
    float v[kCount];
    load(v);
    const std::uint32_t signs = word_of(v, [](float each) { return is_negative(each); });
    std::uint32_t counted = 0;  // zeros in the upper 16 bits, negatives in the lower
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) counted += v[i] == 0 ? 1U << 16 : 0;
    counted = team.sum(counted + static_cast<std::uint32_t>(__popc(signs)));
    const std::uint32_t zeros = (counted >> 16) - (team.warps() * kSegment - n);
    const bool masked = 16 * zeros > n;
    MaskWritten written{bytes_of_bits(n), counted & 0xFFFFU, false};
    if (masked)
      written = write_mask(signs, word_of(v, [](float each) { return each != 0; }), n, team, room,
                           out + kHeader);
    const std::uint32_t positives = n - written.negatives - (masked ? zeros : 0);
    Means means = Means::of(add_up(v, 1, team), positives, written.negatives);
    if (!means.finite()) {
      if (!finite(v)) return give_up(unit);
      means = limited(Means::of(add_up(v, kHugeScale, team), positives, written.negatives));
    }
    if (!masked) write_words(signs);
    const float minus = __uint_as_float(magnitude_bits(means.minus));
    write_header({masked ? -means.plus : means.plus,
                  !masked ? means.minus : (written.has_runs ? minus : -minus)},
                 written.bytes, unit);
    if constexpr (kLooksTwice) finish(v, means, masked);
  }

  // Writes e' = v - decoded and y = decoded · factor, where these are asked for.
  __device__ void finish(float (&v)[kCount], Means means, bool masked) const {
    float y[kCount];
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const float mean = is_negative(v[i]) ? means.minus : means.plus;
      const float decoded = masked && v[i] == 0 ? 0 : mean;
      v[i] = v[i] - decoded;
      if constexpr (kFinishes) y[i] = canonical(decoded * of.factor);
    }
    if constexpr (kFeedsBack) share.store(feedback.after + begin, inside, v);
    if constexpr (kFinishes) share.store(of.y + begin, inside, y);
  }

  // Writes a block with a value that is not finite: all of it decodes to NaN.
  __device__ void give_up(std::uint64_t unit) const {
    write_words(0);
    write_header({quiet_nan<float>(), quiet_nan<float>()}, bytes_of_bits(n), unit);
    if (kFinishes && team.rank() == 0) set_flag(of.flags, kNotFinite);
    for (std::uint32_t i = team.lane(); i < inside && i < kSegment; i += kWarp) {
      if constexpr (kFeedsBack) feedback.after[begin + i] = 0;
      if constexpr (kFinishes) of.y[begin + i] = quiet_nan<float>();
    }
  }
};

template <bool kFeedsBack, bool kFinishes, bool kAlone>
__global__ void __launch_bounds__(kWarp*(kAlone ? kAloneWarps : kMostWarps),
                                  kAlone ? kAloneBlocks : 2) encode(Encoding of) {
  __shared__ BitRoom<kAlone> rooms[kAlone ? kAloneWarps : 1];
  const Team<kAlone> team;
  Feedback feedback{};
  if constexpr (kFeedsBack) feedback = feedback_of(of.run_feedback);
  BitRoom<kAlone>& room = rooms[kAlone ? threadIdx.x / kWarp : 0];
  for (std::uint64_t unit = team.number(); unit * of.block < of.n; unit += team.count()) {
    const std::uint64_t begin = unit * of.block;
    const auto n = static_cast<std::uint32_t>(of.n - begin < of.block ? of.n - begin : of.block);
    const std::uint32_t segment = team.warp() * kSegment;
    const Block<kFeedsBack, kFinishes, kAlone> block{of,
                                                     feedback,
                                                     team,
                                                     {team.lane()},
                                                     room,
                                                     begin + segment,
                                                     n,
                                                     n > segment ? n - segment : 0,
                                                     of.out + unit * of.slot_bytes};
    block.encode(unit);
  }
}

template <bool kFeedsBack, bool kFinishes>
Status start(const Encoding& of, Stream stream) {
  const std::uint64_t units = blocks_for(of.n, of.block);
  if (of.block <= kSegment)
    return launch(encode<kFeedsBack, kFinishes, true>, blocks_for(units, kAloneWarps),
                  kAloneWarps * kWarp, stream, of);
  const auto warps = static_cast<unsigned>(blocks_for(of.block, kSegment));
  return launch(encode<kFeedsBack, kFinishes, false>, units, warps * kWarp, stream, of);
}

template <bool kFinishes>
Status start(Encoding of, Stream stream) {
  if (of.block > OneBitKernels::kMostBlock) return cudaErrorInvalidValue;
  of.slot_bytes = slot_bytes(of.block);
  return keeps_errors(of.run_feedback) ? start<true, kFinishes>(of, stream)
                                       : start<false, kFinishes>(of, stream);
}

Status onebit_encode(const float* x, RunFeedback run_feedback, std::uint64_t n, std::uint64_t block,
                     std::byte* out, std::uint32_t* sizes, Stream stream) {
  return start<false>({x, run_feedback, n, block, 0, out, sizes, nullptr, 1, nullptr}, stream);
}

Status onebit_finish(const float* x, RunFeedback run_feedback, std::uint64_t n, std::uint64_t block,
                     std::byte* out, std::uint32_t* sizes, float* y, float factor,
                     std::uint32_t* flags, Stream stream) {
  return start<true>({x, run_feedback, n, block, 0, out, sizes, y, factor, flags}, stream);
}

}  // namespace

void fill_onebit(Api& api) {
  api.onebit_encode = onebit_encode;
  api.onebit_finish = onebit_finish;
}

}  // namespace gradwire::cuda
