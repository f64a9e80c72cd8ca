// Staging: memory that each rank writes and all others read, and the counters in it that say what
// is there. A counter only rises, and only its own rank's kernels write it, so that a graph may be
// replayed, and nothing that a peer does late can harm this rank. Ranks wait for each other's
// counters by loads from the other's memory.
//
// Where a peer never comes, the host sets `ended`: all kernels that wait end, and later ones do
// nothing.
#pragma once

#include "gradwire/cuda/plugin/share.cuh"

namespace gradwire::cuda {

#ifdef GRADWIRE_SIMULATED_CUDA
inline constexpr unsigned kStagedThreads = 64;
inline constexpr unsigned kMostLanes = 2, kLanesInAll = 6, kMeetingBlocks = 3;
inline constexpr std::size_t kSlotBytes = 1024;
#else
inline constexpr unsigned kStagedThreads = 256;
inline constexpr unsigned kMostLanes = 8, kLanesInAll = 32, kMeetingBlocks = 64;
inline constexpr std::size_t kSlotBytes = 32768;
#endif
// A message is cut into pieces of a slot's bytes; piece i goes through lane i modulo the lanes,
// each of which has so many slots, taken in turn.
inline constexpr unsigned kSlots = 2;
// What a block of reduce_staged() takes at once, at most: so many vectors for each thread.
inline constexpr unsigned kMostVectors = 4;
inline constexpr std::size_t kTileBytes = kMostVectors * kStagedThreads * kVector;

// Returns the lanes from one rank to another. All blocks, one for each lane and direction, must fit
// on a device at once.
__host__ __device__ inline unsigned lanes_of(int size) {
  const unsigned each = kLanesInAll / static_cast<unsigned>(size);
  return each < 1 ? 1 : each > kMostLanes ? kMostLanes : each;
}

// The beginning of a rank's staging. Slots follow, by peer and lane, and then tiles, by block: two
// halves of one for each owner, taken in turn, and one for the rank's own sums.
struct StagingHead {
  std::uint64_t generation[2];                   // the host's (messages/messages_ipc.cc)
  std::uint64_t sent[kMostMapped][kMostLanes];   // pieces, to each rank
  std::uint64_t taken[kMostMapped][kMostLanes];  // pieces, from each rank
  std::uint64_t met[kMeetingBlocks];             // meetings of each block
};
inline constexpr std::size_t kHeadBytes = (sizeof(StagingHead) + 1023) / 1024 * 1024;

__host__ __device__ inline std::size_t slots_bytes(int size) {
  return static_cast<std::size_t>(size) * lanes_of(size) * kSlots * kSlotBytes;
}
__host__ __device__ inline unsigned tiles_of_block(int size) {
  return 2 * static_cast<unsigned>(size) + 1;
}

__device__ inline StagingHead& head_of(const Staging& of, int rank) {
  return *reinterpret_cast<StagingHead*>(of.of[rank]);
}
// Returns the slot of a piece that goes from one rank to another.
__device__ inline std::byte* slot_of(const Staging& of, int from, int to, unsigned lane,
                                     std::uint64_t number) {
  const std::size_t at = (static_cast<std::size_t>(to) * lanes_of(of.size) + lane) * kSlots;
  return of.of[from] + kHeadBytes + (at + number % kSlots) * kSlotBytes;
}
__device__ inline std::byte* tile_of(const Staging& of, int rank, unsigned number) {
  const std::size_t at = std::size_t{blockIdx.x} * tiles_of_block(of.size) + number;
  return of.of[rank] + kHeadBytes + slots_bytes(of.size) + at * kTileBytes;
}

#ifdef GRADWIRE_SIMULATED_CUDA
inline std::uint64_t load_acquire(const std::uint64_t* at) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
inline void store_release(std::uint64_t* at, std::uint64_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
inline bool has_ended(const std::uint32_t* ended) {
  return __atomic_load_n(ended, __ATOMIC_RELAXED) != 0;
}
inline void pause_thread() { simulated::pause(); }
inline constexpr unsigned kSpins = 1;
#else
// Other processes and devices take part, so the scope is the whole system.
__device__ inline std::uint64_t load_acquire(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline void store_release(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}
__device__ inline bool has_ended(const std::uint32_t* ended) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(ended) : "memory");
  return value != 0;
}
__device__ inline void pause_thread() { __nanosleep(40); }
inline constexpr unsigned kSpins = 256;  // between two looks at `ended`, which is far away
#endif

// For all threads of a block, before they write anything, but after they have read the counter on
// which they go on: whether the messages have ended. A kernel that ended while it waited has not
// told the last of its counters; what later ones told in its place, peers would take for that.
__device__ inline bool is_over(const Staging& of) {
  return __syncthreads_or(threadIdx.x == 0 && has_ended(of.ended) ? 1 : 0) != 0;
}

// Waits until a counter is at least that much; returns false where it never will be.
__device__ inline bool wait_for(const Staging& of, const std::uint64_t* counter,
                                std::uint64_t least) {
  for (unsigned spins = 1; load_acquire(counter) < least; ++spins) {
    if (spins % kSpins != 0) continue;
    if (has_ended(of.ended)) return false;
    pause_thread();
  }
  return true;
}

// For all threads of a block: sets this rank's counter once all of them have come here, after what
// they have written, and read.
__device__ inline void tell(std::uint64_t* counter, std::uint64_t value) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    store_release(counter, value);
  }
}

// For all threads of a block: waits for the same block of all ranks. Returns false where one never
// comes.
__device__ inline bool meet(const Staging& of, std::uint64_t number) {
  tell(&head_of(of, of.rank).met[blockIdx.x], number);
  bool has_come = true;
  if (threadIdx.x < static_cast<unsigned>(of.size) && threadIdx.x != static_cast<unsigned>(of.rank))
    has_come = wait_for(of, &head_of(of, static_cast<int>(threadIdx.x)).met[blockIdx.x], number);
  return __syncthreads_and(has_come) != 0;
}

}  // namespace gradwire::cuda
