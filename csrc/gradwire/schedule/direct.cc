// Every rank talks to every other in one round (Li et al. 2014, sharded parameter server), or all
// talk to one (Iandola et al. 2016, one parameter server).
//   direct:   rank s --chunk d--> rank d, then rank s --chunk s--> rank d     for all s ≠ d
//   star:     rank s --all--> root, then root --all--> rank d                 pairwise: see below
#include "gradwire/schedule/families.h"

namespace gradwire::schedule {
namespace {

// Calls edge(src, dst) for all pairs, nearest right neighbour first, so that no round starts with
// all ranks sending to the same one.
template <typename EdgeFn>
void for_each_pair(int p, EdgeFn edge) {
  for (int distance = 1; distance < p; ++distance)
    for (Rank src = 0; src < p; ++src) edge(src, wrap(src + distance, p));
}

void direct_reduce_scatter(Builder& out, Rank) {
  const int round = out.rounds();
  for_each_pair(out.ranks(), [&](Rank s, Rank d) { out.reduce(round, s, d, {d, d + 1}); });
}

void direct_all_gather(Builder& out, Rank) {
  const int round = out.rounds();
  for_each_pair(out.ranks(), [&](Rank s, Rank d) { out.copy(round, s, d, {s, s + 1}); });
}

void direct_all_to_all(Builder& out, Rank) {
  const int p = out.ranks();
  const int round = out.rounds();
  for_each_pair(p, [&](Rank s, Rank d) { out.copy(round, s, d, {s * p + d, s * p + d + 1}); });
}

// Pairwise exchange: in round k every rank sends to the one k+1 to its right, so that each link
// carries one message at a time (Thakur, Rabenseifner & Gropp 2005, sec. 4.3).
void pairwise_all_to_all(Builder& out, Rank) {
  const int p = out.ranks();
  const int begin = out.rounds() - 1;
  for_each_pair(p, [&](Rank s, Rank d) {
    out.copy(begin + wrap(d - s, p), s, d, {s * p + d, s * p + d + 1});
  });
}

template <typename EdgeFn>
void for_each_other(int p, Rank root, EdgeFn edge) {
  for (int distance = 1; distance < p; ++distance) edge(wrap(root + distance, p));
}

void star_reduce(Builder& out, Rank root) {
  const int round = out.rounds();
  for_each_other(out.ranks(), root, [&](Rank r) { out.reduce(round, r, root, {0, out.chunks()}); });
}

void star_broadcast(Builder& out, Rank root) {
  const int round = out.rounds();
  for_each_other(out.ranks(), root, [&](Rank r) { out.copy(round, root, r, {0, out.chunks()}); });
}

void star_gather(Builder& out, Rank root) {
  const int round = out.rounds();
  for_each_other(out.ranks(), root, [&](Rank r) { out.copy(round, r, root, {r, r + 1}); });
}

void star_scatter(Builder& out, Rank root) {
  const int round = out.rounds();
  for_each_other(out.ranks(), root, [&](Rank r) { out.copy(round, root, r, {r, r + 1}); });
}

int chunk_per_pair(int ranks) { return ranks * ranks; }

Rank owner_of_its_own(int chunk, int) { return chunk; }
Rank owner_zero(int, int) { return 0; }

int any(int p) { return p > 1 ? 1 : 0; }

ScheduleShape direct_half(int p) { return {any(p), all_but_one(p)}; }
ScheduleShape direct_both(int p) { return {2 * any(p), 2 * all_but_one(p)}; }
ScheduleShape direct_exchange(int p) { return {any(p), all_but_one(p) / p}; }
ScheduleShape pairwise_exchange(int p) { return {p - 1, all_but_one(p) / p}; }
ScheduleShape star_in(int p) { return {any(p), 1.0 * any(p)}; }
ScheduleShape star_out(int p) { return {any(p), p - 1.0}; }
ScheduleShape star_both(int p) { return {2 * any(p), p - 1.0}; }
ScheduleShape star_gathered(int p) { return {any(p), 1.0 * any(p) / p}; }
ScheduleShape star_scattered(int p) { return {any(p), all_but_one(p)}; }

constexpr Variant kVariants[] = {
    {Collective::kAllReduce, "direct", chunk_per_rank, direct_reduce_scatter, direct_both,
     direct_all_gather, owner_of_its_own},
    {Collective::kReduceScatter, "direct", chunk_per_rank, direct_reduce_scatter, direct_half},
    {Collective::kAllGather, "direct", chunk_per_rank, direct_all_gather, direct_half},
    {Collective::kAllToAll, "direct", chunk_per_pair, direct_all_to_all, direct_exchange},
    {Collective::kAllToAll, "pairwise", chunk_per_pair, pairwise_all_to_all, pairwise_exchange},
    {Collective::kAllReduce, "star", one_chunk, star_reduce, star_both, star_broadcast, owner_zero},
    {Collective::kReduce, "star", one_chunk, star_reduce, star_in},
    {Collective::kBroadcast, "star", one_chunk, star_broadcast, star_out},
    {Collective::kGather, "star", chunk_per_rank, star_gather, star_gathered},
    {Collective::kScatter, "star", chunk_per_rank, star_scatter, star_scattered},
};

}  // namespace

std::span<const Variant> direct_family() { return kVariants; }

}  // namespace gradwire::schedule
