// Blocks that onebit encodes (codec/onebit.cc defines them). A warp holds 1024 elements of a block
// in registers. A lane has 32 of them: those that the definition's lane sums. So neighbouring lanes
// load and store neighbouring elements, whatever the alignment, and a ballot gives a word of signs.
#pragma once

#include "gradwire/cuda/plugin/bits.cuh"
#include "gradwire/cuda/plugin/floats.cuh"
#include "gradwire/cuda/plugin/onebit/onebit_group.cuh"
#include "gradwire/cuda/plugin/share.cuh"
#include "gradwire/cuda/plugin/span_feedback.cuh"

namespace gradwire::cuda::onebit {

// ---- Means -------------------------------------------------------------------------------------

// A lane's sums of the values of each sign.
struct LaneSums {
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
__device__ LaneSums add_up(const float (&v)[kCount], float scale, Team<kAlone> team) {
  LaneSums sums{0, 0};
  const auto add_own = [&] {
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) sums.add(v[i] * scale);
  };
  if constexpr (kAlone) {
    add_own();
  } else {
    __shared__ LaneSums of_lane[kWarp];
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

struct BlockMeans {
  float plus, minus;

  __device__ static BlockMeans of(LaneSums sums, std::uint32_t positives, std::uint32_t negatives) {
    return {positives == 0 ? 0 : sums.plus / static_cast<float>(positives),
            negatives == 0 ? 0 : sums.minus / static_cast<float>(negatives)};
  }
  __device__ bool finite() const { return is_finite(plus) && is_finite(minus); }
};

inline constexpr float kHugeScale = 0x1p-24F;

// Returns a block's means, limited to finite floats, from the means of its values times kHugeScale.
// Sums of values so scaled are finite.
__device__ inline BlockMeans limited(BlockMeans scaled) {
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

struct WrittenMask {
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
__device__ WrittenMask write_mask(std::uint32_t signs, std::uint32_t present, std::uint32_t n,
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

// ---- What was received --------------------------------------------------------------------------

// Adds the means that a lane's signs stand for.
__device__ inline void add_signs(std::uint32_t signs, SentMeans means, float (&v)[kCount]) {
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i)
    v[i] = v[i] + ((signs >> i & 1U) != 0 ? means.minus : means.plus);
}

// Adds a block that may have a mask, or means that are not finite.
template <bool kAlone>
__device__ std::uint32_t add_masked(const PayloadGroup& group, const PayloadSlot& here,
                                    std::uint32_t n, Team<kAlone> team, GroupRoom<kAlone>& room,
                                    float (&v)[kCount]) {
  const std::uint32_t flags = unpack(group, n, team, room, [&](unsigned) { return here; });
  const SentMeans means = room.means[0];
  const std::uint32_t signs = transpose(room.signs[0][team.rank()]);
  const std::uint32_t present = transpose(room.present[0][team.rank()]);
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) {
    const float mean = (signs >> i & 1U) != 0 ? means.minus : means.plus;
    v[i] = v[i] + ((present >> i & 1U) != 0 ? mean : 0);
  }
  return flags;
}

// Adds a block of n elements of each payload in turn to v, of which a lane has every 32nd element.
// `received` has their count(), at least 1, and the block's slot in each, at(j). Returns the flags
// to set; where a payload is refused, v becomes NaN.
template <bool kAlone, typename Received>
__device__ std::uint32_t add_received(const Received& received, std::uint64_t slot_bytes,
                                      std::uint32_t n, Team<kAlone> team, GroupRoom<kAlone>& room,
                                      float (&v)[kCount]) {
  std::uint32_t flags = 0;
  const std::byte* slot = received.at(0);
  Plane next = load_slot(slot, n, team.rank());
  for (int j = 0; j < received.count(); ++j) {
    const PayloadSlot here{slot, slot_bytes};
    PayloadGroup group{};
    group.count = 1;
    group.planes[0] = next;
    if (j + 1 < received.count()) {
      slot = received.at(j + 1);
      next = load_slot(slot, n, team.rank());
    }
    const SentMeans sent = group.planes[0].means;
    if (sent.usual())
      add_signs(transpose(group.planes[0].word), sent.decoded(), v);
    else
      flags |= add_masked(group, here, n, team, room, v);
  }
  const bool refused = (flags & kRefused) != 0;
#pragma unroll
  for (unsigned i = 0; i < kCount; ++i) v[i] = refused ? quiet_nan<float>() : canonical(v[i]);
  return flags;
}

// ---- Blocks ------------------------------------------------------------------------------------

// A block that a team encodes: payloads and e are added to x first. y is written where the block
// finishes.
template <bool kFeedsBack, bool kFinishes, bool kAlone, typename Received>
struct OneBitBlockEncoder {
  const GpuSpan& span;
  Residuals feedback;    // of the span
  std::uint64_t number;  // the block's number in the span
  std::uint64_t begin;   // of the thread's stripe, in the span
  std::uint32_t n;       // elements of the block
  std::uint32_t inside;  // elements from the stripe's first to the block's last
  std::byte* out;        // the block's slot
  const Encoding& how;
  std::uint32_t* flags;
  const Received& received;  // for add_received(), or none
  std::uint64_t slot_bytes;
  Team<kAlone> team;
  Share<kWarp, kCount, 1> share;
  BitRoom<kAlone>& bits;
  GroupRoom<kAlone>* group;  // null without payloads

  __device__ void load(float (&v)[kCount]) const {
    share.load(span.x + begin, inside, v);
    if constexpr (Received::kAny) {
      const std::uint32_t found = add_received(received, slot_bytes, n, team, *group, v);
      if (found != 0 && team.rank() == 0) set_flag(flags, found);
#pragma unroll
      for (unsigned i = 0; i < kCount; ++i)
        if (share.element(i) >= inside) v[i] = 0;  // as they are without payloads
    }
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
  __device__ void write_header(BlockMeans means, std::uint32_t bytes) const {
    if (team.rank() > 0) return;
    auto* const header = reinterpret_cast<float*>(out);
    header[0] = means.plus;
    header[1] = means.minus;
    reinterpret_cast<std::uint32_t*>(how.out + span.payload)[number] = kHeader + bytes;
  }

  __device__ void encode() const {
    float v[kCount];
    load(v);
    const std::uint32_t signs = word_of(v, [](float each) { return is_negative(each); });
    std::uint32_t counted = 0;  // zeros in the upper 16 bits, negatives in the lower
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) counted += v[i] == 0 ? 1U << 16 : 0;
    counted = team.sum(counted + static_cast<std::uint32_t>(__popc(signs)));
    const std::uint32_t zeros = (counted >> 16) - (team.warps() * kStripe - n);
    const bool masked = 16 * zeros > n;
    WrittenMask written{bytes_of_bits(n), counted & 0xFFFFU, false};
    if (masked)
      written = write_mask(signs, word_of(v, [](float each) { return each != 0; }), n, team, bits,
                           out + kHeader);
    const std::uint32_t positives = n - written.negatives - (masked ? zeros : 0);
    BlockMeans means = BlockMeans::of(add_up(v, 1, team), positives, written.negatives);
    if (!means.finite()) {
      if (!finite(v)) return give_up();
      means = limited(BlockMeans::of(add_up(v, kHugeScale, team), positives, written.negatives));
    }
    if (!masked) write_words(signs);
    const float minus = __uint_as_float(magnitude_bits(means.minus));
    write_header({masked ? -means.plus : means.plus,
                  !masked ? means.minus : (written.has_runs ? minus : -minus)},
                 written.bytes);
    if constexpr (kFeedsBack || kFinishes) finish(v, means, masked);
  }

  // Writes e' = v - decoded and y = decoded · factor, where these are asked for.
  __device__ void finish(float (&v)[kCount], BlockMeans means, bool masked) const {
    float decoded[kCount];
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const float mean = is_negative(v[i]) ? means.minus : means.plus;
      const float its = masked && v[i] == 0 ? 0 : mean;
      v[i] = v[i] - (0.0F + its);  // CPUs decode by adding to 0: no -0
      if constexpr (kFinishes) decoded[i] = canonical(its * how.factor);
    }
    if constexpr (kFeedsBack) share.store(feedback.after + begin, inside, v);
    if constexpr (kFinishes) share.store(span.y + begin, inside, decoded);
  }

  // Writes a block with a value that is not finite: all of it decodes to NaN.
  __device__ void give_up() const {
    write_words(0);
    write_header({quiet_nan<float>(), quiet_nan<float>()}, bytes_of_bits(n));
    if (kFinishes && team.rank() == 0) set_flag(flags, kNotFinite);
    for (std::uint32_t i = team.lane(); i < inside && i < kStripe; i += kWarp) {
      if constexpr (kFeedsBack) feedback.after[begin + i] = 0;
      if constexpr (kFinishes) span.y[begin + i] = quiet_nan<float>();
    }
  }
};

}  // namespace gradwire::cuda::onebit
