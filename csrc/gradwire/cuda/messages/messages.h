// Messages: exchanges bytes between one rank's GPU and those of other ranks. The messages that are
// posted between begin() and end() are a group, which end() enqueues on a stream. The group reads
// what earlier work on that stream has written. When later work on the stream begins, all bytes of
// the group have arrived, and its memory may be used again. Messages of a group between the same
// two ranks match in the order in which they are posted.
//
// There are three implementations: NCCL (nccl/nccl_comm.h), virtual ranks in one process
// (messages_loopback.h) and the CPU transports (messages_host.h); messages_routed.h combines
// several. One thread at a time uses it; any thread may call abort().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "gradwire/base/error.h"
#include "gradwire/base/types.h"
#include "gradwire/cuda/api.h"

namespace gradwire::cuda {

// A span of a message of which not all bytes count. It begins with a table of the sizes of its
// units, 4 bytes each, padded to kPayloadAlignment. Then each unit has a slot, of which the first
// `size` bytes count.
struct Slotted {
  std::uint64_t units = 0;
  std::size_t slot_bytes = 0;

  std::size_t table_bytes() const noexcept { return aligned(sizeof(std::uint32_t) * units); }
  std::size_t bytes() const noexcept { return table_bytes() + units * slot_bytes; }
};

// A collective as the library between the GPUs has it, on blocks in device memory.
//
// At rank r of p, with `count` elements: all_reduce, broadcast, reduce: input and output have so
// many; reduce_scatter: the input has p blocks of so many, one after the other, and the output is
// block r; all_gather: the other way round; all_to_all: both have p blocks, and block s of the
// output comes from rank s. Input and output may be the same memory, where that is block r of the
// longer one; not those of an all_to_all.
struct NativeCollective {
  Collective collective = Collective::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;  // reduce: used at the root only
  std::uint64_t count = 0;
};

class Messages {
 public:
  virtual ~Messages() = default;

  virtual std::string_view name() const noexcept = 0;

  virtual void begin() = 0;
  // Post a message. `layout` lists the spans of the whole message in order, the same at both ends;
  // if it is empty, all bytes count. Only the device knows which bytes count, so messages may still
  // be sent whole.
  virtual void send(const std::byte* data, std::size_t bytes, Rank peer,
                    std::span<const Slotted> layout = {}) = 0;
  virtual void receive(std::byte* data, std::size_t bytes, Rank peer,
                       std::span<const Slotted> layout = {}) = 0;
  // Enqueues the group. Throws TransportError, Timeout or Aborted as the CPU transports do; then
  // nothing more may be posted.
  virtual void end(Stream stream) = 0;

  // Returns whether the library has collectives of its own. run_native() enqueues all of a call's
  // together, outside of groups, and throws as end() does.
  virtual bool has_collectives() const noexcept { return false; }
  virtual void run_native(std::span<const NativeCollective> /*collectives*/, Stream /*stream*/) {
    throw InvalidArgument("these messages between GPUs have no collectives of their own");
  }

  // Throws if enqueued messages have failed.
  virtual void check() = 0;
  // Makes enqueued work end, whatever the peers do. Later calls throw Aborted.
  virtual void abort() noexcept = 0;

  // To be called before destruction: waits some seconds for enqueued work. Returns false if
  // something may still refer to this object, which must not be destroyed then.
  virtual bool rest() noexcept { return true; }

  // Says that other Messages carry frames of the same rounds (messages_routed.h). After a failure,
  // enqueued work then goes on only after abort(), or some seconds: so the others can be aborted
  // first, and send no rank bytes that never came.
  virtual void join_others() noexcept {}

  // Sets a word in memory that devices can read, which must outlive this. kLost is set there before
  // enqueued work goes on without bytes that it waited for.
  virtual void set_loss_word(std::uint32_t* word) { lost_ = word; }

 protected:
  void mark_lost() noexcept {
    if (lost_ != nullptr) std::atomic_ref(*lost_).fetch_or(kLost);
  }

 private:
  std::uint32_t* lost_ = nullptr;
};

}  // namespace gradwire::cuda
