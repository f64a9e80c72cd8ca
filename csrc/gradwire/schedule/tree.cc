// Trees: partial sums climb to the root, the finished sum comes down, segment by segment.
//   binary_tree:         ranks 1, 2 --all--> rank 0, …    floor(log2 p) rounds each way, 3 n a rank
//   double_binary_tree:  two trees, half of the buffer each: who is inside one is a leaf of the
//                        other (Sanders, Speck & Träff 2009)    ceil(log2 p) rounds, 2 n a rank
#include <algorithm>
#include <bit>
#include <vector>

#include "gradwire/schedule/families.h"

namespace gradwire::schedule {
namespace {

// Each rank's parent; the root is its own.
using Tree = std::vector<Rank>;

int depth_of(const Tree& tree, Rank rank) {
  int depth = 0;
  for (Rank parent; (parent = tree[at(rank)]) != rank; rank = parent) ++depth;
  return depth;
}

int height_of(const Tree& tree) {
  int height = 0;
  for (Rank r = 0; r < static_cast<Rank>(tree.size()); ++r)
    height = std::max(height, depth_of(tree, r));
  return height;
}

// A rank at depth d sends in round height - d, after all its descendants have sent.
void climb(Builder& out, int begin, const Tree& tree, ChunkRange chunks) {
  const int height = height_of(tree);
  for (Rank r = 0; r < out.ranks(); ++r)
    if (const int depth = depth_of(tree, r); depth > 0)
      out.reduce(begin + height - depth, r, tree[at(r)], chunks);
}

void descend(Builder& out, int begin, const Tree& tree, ChunkRange chunks) {
  for (Rank r = 0; r < out.ranks(); ++r)
    if (const int depth = depth_of(tree, r); depth > 0)
      out.copy(begin + depth - 1, tree[at(r)], r, chunks);
}

// Returns a tree laid out as a binary heap, counted from the root.
Tree heap_tree(int p, Rank root) {
  Tree tree(at(p), root);
  for (int i = 1; i < p; ++i) tree[at(wrap(root + i, p))] = wrap(root + (i - 1) / 2, p);
  return tree;
}

// Returns the parent in the lowest-set-bit tree over positions 0 … p-1: 0 has one child, and below
// it even positions are inside and odd ones are leaves. A position's parent moves its lowest set
// bit up by one, or drops it where that would leave the tree.
int parent_position(int position, int p) {
  const int bit = position & -position;
  const int up = (position ^ bit) | (bit << 1);
  return up < p ? up : position ^ bit;
}

// Returns the tree in which rank_at[i] stands at position i.
Tree lowest_bit_tree(const std::vector<Rank>& rank_at) {
  const auto p = static_cast<int>(rank_at.size());
  Tree tree(rank_at.size(), rank_at[0]);
  for (int i = 1; i < p; ++i)
    tree[static_cast<std::size_t>(rank_at[static_cast<std::size_t>(i)])] =
        rank_at[at(parent_position(i, p))];
  return tree;
}

Tree first_tree(int p, Rank root) {
  std::vector<Rank> rank_at(at(p));
  for (int i = 0; i < p; ++i) rank_at[at(i)] = wrap(root + i, p);
  return lowest_bit_tree(rank_at);
}

// Returns the same tree with the p-1 ranks below the root in another order, so that the ranks at
// even positions of the first tree are at odd ones here: mirrored where p-1 is even, shifted by one
// where it is odd.
Tree second_tree(int p, Rank root) {
  std::vector<Rank> rank_at(at(p), root);
  for (int i = 1; i < p; ++i) {
    const int other = p % 2 == 1 ? p - i : i % (p - 1) + 1;
    rank_at[at(i)] = wrap(root + other, p);
  }
  return lowest_bit_tree(rank_at);
}

void binary_reduce(Builder& out, Rank root) {
  climb(out, out.rounds(), heap_tree(out.ranks(), root), {0, 1});
}

void binary_broadcast(Builder& out, Rank root) {
  descend(out, out.rounds(), heap_tree(out.ranks(), root), {0, 1});
}

void double_reduce(Builder& out, Rank root) {
  const int begin = out.rounds();
  climb(out, begin, first_tree(out.ranks(), root), {0, 1});
  climb(out, begin, second_tree(out.ranks(), root), {1, 2});
}

void double_broadcast(Builder& out, Rank root) {
  const int begin = out.rounds();
  descend(out, begin, first_tree(out.ranks(), root), {0, 1});
  descend(out, begin, second_tree(out.ranks(), root), {1, 2});
}

int two_chunks(int) { return 2; }
Rank owner_zero(int, int) { return 0; }

int floor_log2(int p) { return std::bit_width(static_cast<unsigned>(p)) - 1; }
int ceil_log2(int p) { return std::bit_width(static_cast<unsigned>(p - 1)); }

ScheduleShape up(int rounds, int p) { return {rounds, p > 1 ? 1.0 : 0.0}; }

// A rank inside a tree sends to its children, at most two, and to its parent if it has one.
ScheduleShape binary_up(int p) { return up(floor_log2(p), p); }
ScheduleShape binary_down(int p) { return {floor_log2(p), 1.0 * std::min(2, p - 1)}; }
ScheduleShape binary_both(int p) {
  return {2 * floor_log2(p), p >= 5 ? 3.0 : 1.0 * std::min(2, p - 1)};
}

ScheduleShape double_up(int p) { return up(ceil_log2(p), p); }
// With p ≥ 4 some rank feeds two children in one tree (2 · n/2) and climbs in both (2 · n/2).
ScheduleShape double_both(int p) {
  return {2 * ceil_log2(p), std::min(2.0, p / 2.0) * (p > 1 ? 1 : 0)};
}

constexpr Variant kVariants[] = {
    {Collective::kAllReduce, "binary_tree", one_chunk, binary_reduce, binary_both, binary_broadcast,
     owner_zero},
    {Collective::kReduce, "binary_tree", one_chunk, binary_reduce, binary_up},
    {Collective::kBroadcast, "binary_tree", one_chunk, binary_broadcast, binary_down},
    {Collective::kAllReduce, "double_binary_tree", two_chunks, double_reduce, double_both,
     double_broadcast, owner_zero},
    {Collective::kReduce, "double_binary_tree", two_chunks, double_reduce, double_up},
    {Collective::kBroadcast, "double_binary_tree", two_chunks, double_broadcast, double_up},
};

}  // namespace

std::span<const Variant> tree_family() { return kVariants; }

}  // namespace gradwire::schedule
