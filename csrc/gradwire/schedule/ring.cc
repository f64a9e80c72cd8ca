// Ring: every rank passes one chunk a round to its right (Patarasuk & Yuan 2009, sec. 3).
//   round k of reduce_scatter:   rank r --chunk r-k-1--> rank r+1    p-1 rounds, (p-1)/p n a rank
//   round k of all_gather:       rank r --chunk r-k----> rank r+1    the same again
#include "gradwire/schedule/families.h"

namespace gradwire::schedule {
namespace {

// On return, rank r owns the finished chunk r.
void reduce_scatter(Builder& out, Rank) {
  const int p = out.ranks();
  const int begin = out.rounds();
  for (int k = 0; k < p - 1; ++k) {
    for (Rank r = 0; r < p; ++r) {
      const int chunk = wrap(r - k - 1, p);
      out.reduce(begin + k, /*src=*/r, /*dst=*/wrap(r + 1, p), {chunk, chunk + 1});
    }
  }
}

void all_gather(Builder& out, Rank) {
  const int p = out.ranks();
  const int begin = out.rounds();
  for (int k = 0; k < p - 1; ++k) {
    for (Rank r = 0; r < p; ++r) {
      const int chunk = wrap(r - k, p);
      out.copy(begin + k, /*src=*/r, /*dst=*/wrap(r + 1, p), {chunk, chunk + 1});
    }
  }
}

Rank owner(int chunk, int) { return chunk; }

ScheduleShape half(int p) { return {p - 1, all_but_one(p)}; }
ScheduleShape both(int p) { return {2 * (p - 1), 2 * all_but_one(p)}; }

constexpr Variant kVariants[] = {
    {Collective::kAllReduce, "ring", chunk_per_rank, reduce_scatter, both, all_gather, owner},
    {Collective::kReduceScatter, "ring", chunk_per_rank, reduce_scatter, half},
    {Collective::kAllGather, "ring", chunk_per_rank, all_gather, half},
};

}  // namespace

std::span<const Variant> ring_family() { return kVariants; }

}  // namespace gradwire::schedule
