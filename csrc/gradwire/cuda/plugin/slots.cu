// Packs the units of a payload from their slots, and computes where packed units begin.
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/team.cuh"

namespace gradwire::cuda {
namespace {

// ---- Where the units begin ---------------------------------------------------------------------

constexpr unsigned kThreads = 1024;
constexpr std::uint64_t kMostParts = 64;
constexpr std::uint64_t kLeastPart = 4 * kThreads;  // units

struct Sizes {
  const std::uint32_t* at;
  std::uint64_t units;
  std::uint64_t most;   // of one unit
  std::uint64_t limit;  // of all units
};

struct Summed {
  std::uint64_t before, all;  // sums of the sizes before a part, and of all
  bool allowed;
};

using AllThreads = Team<false>;

__device__ Summed sum(const Sizes& sizes, std::uint64_t part_begins) {
  std::uint64_t before = 0, all = 0;
  std::uint32_t largest = 0;
#pragma unroll 8
  for (std::uint64_t i = threadIdx.x; i < sizes.units; i += kThreads) {
    const std::uint32_t size = sizes.at[i];
    before += i < part_begins ? size : 0;
    all += size;
    largest = size > largest ? size : largest;
  }
  Summed found{AllThreads::scan(before, Plus{}).all, AllThreads::scan(all, Plus{}).all, true};
  found.allowed = AllThreads::largest(largest) <= sizes.most && found.all <= sizes.limit;
  return found;
}

// Writes the offsets; each block writes one part. Each block adds up all sizes by itself, so that
// no block waits for another: they are few bytes, and cached.
__global__ void __launch_bounds__(kThreads)
    sum_kernel(Sizes sizes, std::uint64_t* offsets, std::uint32_t* flags) {
  const std::uint64_t part = blocks_for(sizes.units, gridDim.x), first = blockIdx.x * part;
  const std::uint64_t last = first + part < sizes.units ? first + part : sizes.units;
  const Summed sums = sum(sizes, first);
  std::uint64_t offset = sums.before;
  for (std::uint64_t i = first; i < last; i += kThreads) {
    const std::uint64_t unit = i + threadIdx.x;
    const std::uint64_t size = unit < last ? sizes.at[unit] : 0;
    const Scanned<std::uint64_t> scanned = AllThreads::scan(size, Plus{});
    if (unit < last) offsets[unit] = sums.allowed ? offset + scanned.before : 0;
    offset += scanned.all;
  }
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  offsets[sizes.units] = sums.allowed ? sums.all : 0;
  if (!sums.allowed) set_flag(flags, kRefused);
}

Status sum_sizes(const Sizes& sizes, std::uint64_t* offsets, std::uint32_t* flags, Stream stream) {
  if (offsets == nullptr) return 0;
  const std::uint64_t parts = blocks_for(sizes.units, kLeastPart);
  const std::uint64_t blocks = parts < 1 ? 1 : parts < kMostParts ? parts : kMostParts;
  return launch(sum_kernel, blocks, kThreads, stream, sizes, offsets, flags);
}

Status offsets(const std::uint32_t* sizes, std::uint64_t units, std::uint64_t slot_bytes,
               std::uint64_t limit, std::uint64_t* offsets, std::uint32_t* flags, Stream stream) {
  return sum_sizes({sizes, units, slot_bytes, limit}, offsets, flags, stream);
}

// ---- Packing ------------------------------------------------------------------------------------

constexpr unsigned kCopyThreads = 256;
constexpr std::uint64_t kOfWarp = 1024;  // bytes: the largest slot that one warp copies alone

// Copies from an aligned address to any address. It reads whole words; the last of them may end
// behind the bytes.
template <typename Team>
__device__ void copy_bytes(const std::byte* from, std::byte* to, std::uint64_t bytes, Team team) {
  const std::uint64_t odd = (4 - reinterpret_cast<std::uintptr_t>(to) % 4) % 4;
  const std::uint64_t head = odd < bytes ? odd : bytes;
  const std::uint64_t words = (bytes - head) / 4, tail = head + 4 * words;
  const auto* const source = reinterpret_cast<const std::uint32_t*>(from);
  auto* const target = reinterpret_cast<std::uint32_t*>(to + head);
  if (team.rank() < head) to[team.rank()] = from[team.rank()];
  if (team.rank() < bytes - tail) to[tail + team.rank()] = from[tail + team.rank()];
  const auto turn = static_cast<unsigned>(8 * head);
#pragma unroll 4
  for (std::uint64_t i = team.rank(); i < words; i += team.size())
    target[i] = turn == 0 ? source[i] : __funnelshift_r(source[i], source[i + 1], turn);
}

template <bool kAlone>
__global__ void __launch_bounds__(kCopyThreads)
    copy_units(const std::byte* slots, std::uint64_t slot_bytes, std::uint64_t units,
               const std::uint64_t* offsets, std::byte* out) {
  const Team<kAlone> team;
  for (std::uint64_t unit = team.number(); unit < units; unit += team.count())
    copy_bytes(slots + unit * slot_bytes, out + offsets[unit], offsets[unit + 1] - offsets[unit],
               team);
}

Status pack(const std::byte* slots, std::uint64_t slot_bytes, const std::uint32_t* sizes,
            std::uint64_t units, std::uint64_t* offsets, std::byte* out, Stream stream) {
  constexpr std::uint64_t kAny = ~std::uint64_t{0};
  const Status status = sum_sizes({sizes, units, kAny, kAny}, offsets, nullptr, stream);
  if (status != 0) return status;
  if (slot_bytes <= kOfWarp)
    return launch(copy_units<true>, blocks_for(units, kCopyThreads / kWarp), kCopyThreads, stream,
                  slots, slot_bytes, units, offsets, out);
  return launch(copy_units<false>, units, kCopyThreads, stream, slots, slot_bytes, units, offsets,
                out);
}

}  // namespace

void fill_slots(Api& api) {
  api.pack = pack;
  api.offsets = offsets;
}

}  // namespace gradwire::cuda
