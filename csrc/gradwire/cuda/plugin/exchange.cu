// Messages through staging. Each block serves one lane of one direction between this rank and
// another, and takes the messages in their order.
#include "gradwire/cuda/plugin/functions.h"
#include "gradwire/cuda/plugin/staging.cuh"

namespace gradwire::cuda {
namespace {

struct Exchange {
  Staging staging;
  unsigned lanes;  // that have something to do
  int count;
  StagedMessage at[kMostStaged];
};

template <typename T>
__device__ void copy_as(std::byte* to, const std::byte* from, std::uint64_t count) {
  auto* y = reinterpret_cast<T*>(to);
  const auto* x = reinterpret_cast<const T*>(from);
#pragma unroll 4
  for (std::uint64_t i = threadIdx.x; i < count; i += kStagedThreads) y[i] = x[i];
}

// By all threads of a block.
__device__ void copy_bytes(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  struct alignas(16) Vector {
    std::uint64_t at[2];
  };
  const auto places = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  std::uint64_t done = 0;
  if (places % sizeof(Vector) == 0) {
    done = bytes / sizeof(Vector) * sizeof(Vector);
    copy_as<Vector>(to, from, done / sizeof(Vector));
  } else if (places % sizeof(std::uint32_t) == 0) {
    done = bytes / sizeof(std::uint32_t) * sizeof(std::uint32_t);
    copy_as<std::uint32_t>(to, from, done / sizeof(std::uint32_t));
  }
  copy_as<std::byte>(to + done, from + done, bytes - done);
}

__device__ bool send_piece(const Staging& of, int peer, unsigned lane, std::uint64_t number,
                           const std::byte* from, std::uint64_t bytes) {
  bool is_free = true;  // the slot
  if (threadIdx.x == 0 && number > kSlots)
    is_free = wait_for(of, &head_of(of, peer).taken[of.rank][lane], number - kSlots);
  if (__syncthreads_and(is_free) == 0) return false;
  copy_bytes(slot_of(of, of.rank, peer, lane, number), from, bytes);
  tell(&head_of(of, of.rank).sent[peer][lane], number);
  return true;
}

__device__ bool take_piece(const Staging& of, int peer, unsigned lane, std::uint64_t number,
                           std::byte* to, std::uint64_t bytes) {
  bool is_there = true;
  if (threadIdx.x == 0) is_there = wait_for(of, &head_of(of, peer).sent[of.rank][lane], number);
  if (__syncthreads_and(is_there) == 0) return false;
  copy_bytes(to, slot_of(of, peer, of.rank, lane, number), bytes);
  tell(&head_of(of, of.rank).taken[peer][lane], number);
  return true;
}

__global__ void __launch_bounds__(kStagedThreads)
    exchange_kernel(const __grid_constant__ Exchange of) {
  const unsigned lane = blockIdx.x % of.lanes, direction = blockIdx.x / of.lanes;
  const int peer = static_cast<int>(direction / 2);
  const bool sends = direction % 2 == 0;
  const unsigned stride = lanes_of(of.staging.size);
  StagingHead& own = head_of(of.staging, of.staging.rank);
  std::uint64_t number = sends ? own.sent[peer][lane] : own.taken[peer][lane];
  if (is_over(of.staging)) return;
  for (int i = 0; i < of.count; ++i) {
    const StagedMessage& each = of.at[i];
    if (each.peer != peer || each.is_sent != sends) continue;
    for (std::uint64_t at = lane * kSlotBytes; at < each.bytes; at += stride * kSlotBytes) {
      const std::uint64_t left = each.bytes - at, bytes = left < kSlotBytes ? left : kSlotBytes;
      ++number;
      const bool goes_on = sends
                               ? send_piece(of.staging, peer, lane, number, each.data + at, bytes)
                               : take_piece(of.staging, peer, lane, number, each.data + at, bytes);
      if (!goes_on) return;
    }
  }
}

std::size_t staging_bytes(int size) {
  const std::size_t bytes = kHeadBytes + slots_bytes(size) +
                            std::size_t{kMeetingBlocks} * tiles_of_block(size) * kTileBytes;
  // CUDA lets small allocations share such blocks, and exports whole ones: in a part of one, ranks
  // would map other memory of this process, too.
  constexpr std::size_t kPage = 2U << 20;
  return (bytes + kPage - 1) / kPage * kPage;
}

Status exchange(const Staging& staging, const StagedMessage* messages, int count, Stream stream) {
  if (count < 0 || count > kMostStaged) return cudaErrorInvalidValue;
  Exchange of{staging, 1, count, {}};
  std::uint64_t most = 0;
  for (int i = 0; i < count; ++i) {
    of.at[i] = messages[i];
    most = messages[i].bytes > most ? messages[i].bytes : most;
  }
  if (most == 0) return 0;
  const std::uint64_t pieces = blocks_for(most, kSlotBytes);
  const unsigned lanes = lanes_of(staging.size);
  of.lanes = pieces < lanes ? static_cast<unsigned>(pieces) : lanes;
  return launch_waiting(exchange_kernel, 2 * static_cast<unsigned>(staging.size) * of.lanes,
                        kStagedThreads, stream, of);
}

}  // namespace

void fill_exchange(Api& api) {
  api.staging_bytes = staging_bytes;
  api.staged_unit_bytes = [] { return kTileBytes; };
  api.exchange = exchange;
}

}  // namespace gradwire::cuda
