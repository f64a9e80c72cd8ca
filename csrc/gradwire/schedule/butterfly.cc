// The butterflies (Thakur, Rabenseifner & Gropp 2005, sec. 4.5); q, the largest power of two <= p:
//   recursive_doubling:  rank r <--all-->  rank r^1, r^2, … r^(q/2)       log2 q rounds of n
//   halving_doubling:    rank r <--half--> rank r^(q/2), … r^1, and back  2(q-1)/q n a rank
//   other p:             odd ranks below 2(p-q) first fold into their left neighbour, and wait
#include <algorithm>
#include <bit>

#include "gradwire/schedule/families.h"

namespace gradwire::schedule {
namespace {

// The q positions of a butterfly over p ranks. Each of the first `extra` positions stands for an
// even rank and the odd rank after it.
struct Fold {
  explicit Fold(int p)
      : core(static_cast<int>(std::bit_floor(static_cast<unsigned>(p)))), extra(p - core) {}

  Rank rank_of(int position) const { return position < extra ? 2 * position : position + extra; }
  int log2_core() const { return std::bit_width(static_cast<unsigned>(core)) - 1; }

  int core;
  int extra;
};

// Returns the chunks of the aligned block of `size` positions that holds `position`: one chunk per
// position or, where chunks = ranks, one for each rank that the positions stand for.
ChunkRange block(const Fold& fold, int chunks, int position, int size) {
  const int first = position & ~(size - 1);
  if (chunks == fold.core) return {first, first + size};
  return {fold.rank_of(first), fold.rank_of(first + size)};
}

void fold_in(Builder& out, const Fold& fold) {
  const int round = out.rounds();
  for (int i = 0; i < fold.extra; ++i) out.reduce(round, 2 * i + 1, 2 * i, {0, out.chunks()});
}

void fold_out(Builder& out, const Fold& fold) {
  const int round = out.rounds();
  for (int i = 0; i < fold.extra; ++i) out.copy(round, 2 * i, 2 * i + 1, {0, out.chunks()});
}

void exchange_all(Builder& out, const Fold& fold) {
  for (int mask = 1; mask < fold.core; mask *= 2) {
    const int round = out.rounds();
    for (int i = 0; i < fold.core; ++i)
      out.reduce(round, fold.rank_of(i), fold.rank_of(i ^ mask), {0, out.chunks()});
  }
}

void halve(Builder& out, const Fold& fold) {
  for (int mask = fold.core / 2; mask > 0; mask /= 2) {
    const int round = out.rounds();
    for (int i = 0; i < fold.core; ++i)
      out.reduce(round, fold.rank_of(i), fold.rank_of(i ^ mask),
                 block(fold, out.chunks(), i ^ mask, mask));
  }
}

void double_up(Builder& out, const Fold& fold) {
  for (int mask = 1; mask < fold.core; mask *= 2) {
    const int round = out.rounds();
    for (int i = 0; i < fold.core; ++i)
      out.copy(round, fold.rank_of(i), fold.rank_of(i ^ mask), block(fold, out.chunks(), i, mask));
  }
}

void recursive_doubling(Builder& out, Rank) {
  const Fold fold(out.ranks());
  fold_in(out, fold);
  exchange_all(out, fold);
  fold_out(out, fold);
}

// On return, the rank at position i owns the finished chunk i.
void reduce_half(Builder& out, Rank) {
  const Fold fold(out.ranks());
  fold_in(out, fold);
  halve(out, fold);
}

void gather_half(Builder& out, Rank) {
  const Fold fold(out.ranks());
  double_up(out, fold);
  fold_out(out, fold);
}

void reduce_scatter(Builder& out, Rank root) {
  reduce_half(out, root);
  const Fold fold(out.ranks());
  const int round = out.rounds();
  for (int i = 0; i < fold.extra; ++i) out.copy(round, 2 * i, 2 * i + 1, {2 * i + 1, 2 * i + 2});
}

void all_gather(Builder& out, Rank) {
  const Fold fold(out.ranks());
  const int collect = out.rounds();
  for (int i = 0; i < fold.extra; ++i) out.copy(collect, 2 * i + 1, 2 * i, {2 * i + 1, 2 * i + 2});
  double_up(out, fold);
  const int hand_out = out.rounds();
  for (int i = 0; i < fold.extra; ++i) {
    const Rank odd = 2 * i + 1;
    out.copy(hand_out, 2 * i, odd, {0, odd});
    if (odd + 1 < out.chunks()) out.copy(hand_out, 2 * i, odd, {odd + 1, out.chunks()});
  }
}

int chunk_per_position(int ranks) { return Fold(ranks).core; }
Rank owner(int chunk, int ranks) { return Fold(ranks).rank_of(chunk); }

// Returns the number of rounds that the fold adds: one before and one after.
int fold_rounds(const Fold& fold) { return fold.extra > 0 ? 2 : 0; }

ScheduleShape doubling_shape(int p) {
  const Fold fold(p);
  const int returned = fold.extra > 0 ? 1 : 0;
  return {fold.log2_core() + fold_rounds(fold), 1.0 * (fold.log2_core() + returned)};
}

ScheduleShape all_reduce_shape(int p) {
  const Fold fold(p);
  const int returned = fold.extra > 0 ? 1 : 0;
  return {2 * fold.log2_core() + fold_rounds(fold), 2 * all_but_one(fold.core) + returned};
}

// An odd rank that folds sends its whole buffer.
ScheduleShape reduce_scatter_shape(int p) {
  const Fold fold(p);
  return {fold.log2_core() + fold_rounds(fold), fold.extra > 0 ? 1 : all_but_one(p)};
}

// Rank 0 sends the most: the block [0, 2^k) in round k, with the odd ranks' chunks, then all chunks
// to rank 1.
ScheduleShape all_gather_shape(int p) {
  const Fold fold(p);
  int chunks = fold.extra > 0 ? p - 1 : 0;
  for (int size = 1; size < fold.core; size *= 2) chunks += size + std::min(size, fold.extra);
  return {fold.log2_core() + fold_rounds(fold), 1.0 * chunks / p};
}

constexpr Variant kVariants[] = {
    {Collective::kAllReduce, "halving_doubling", chunk_per_position, reduce_half, all_reduce_shape,
     gather_half, owner},
    {Collective::kAllReduce, "recursive_doubling", one_chunk, recursive_doubling, doubling_shape},
    {Collective::kReduceScatter, "halving_doubling", chunk_per_rank, reduce_scatter,
     reduce_scatter_shape},
    {Collective::kAllGather, "halving_doubling", chunk_per_rank, all_gather, all_gather_shape},
};

}  // namespace

std::span<const Variant> butterfly_family() { return kVariants; }

}  // namespace gradwire::schedule
