// Messages over NCCL's point-to-point calls, by a communicator that does not block unless its
// settings say so, with one NCCL group for each end(). NCCL's own environment variables
// (NCCL_MAX_CTAS, NCCL_SOCKET_IFNAME, …) apply.
#pragma once

#include <functional>
#include <memory>

#include "gradwire/base/types.h"
#include "gradwire/base/wait_limit.h"
#include "gradwire/cuda/messages/messages.h"
#include "gradwire/cuda/nccl/nccl.h"

namespace gradwire::cuda {

struct NcclSettings {
  Rank rank = 0;
  int size = 1;
  // Limits the wait until all ranks are there, and until each end() is on its stream: a first
  // message between two ranks waits for both.
  double timeout_seconds = 30;
  // Limits an abort, and the destructor's wait; NCCL then ends on a thread that nobody waits for.
  double ending_seconds = 10;
  WaitLimit::Interrupt interrupt = nullptr;
  // Makes the rank's GPU the calling thread's; used by threads that end a communicator, and by that
  // of one that blocks.
  std::function<void()> use_device = nullptr;
  // Makes a communicator that blocks, whose calls are made by one thread that is always there,
  // where NCCL would make a thread for each group. None of NCCL's sources makes it safe to abort
  // one in a call: see docs/design/gpus.md.
  bool blocking = false;
};

// Returns the id that rank 0 makes and all ranks need. Rank 0's process must live until all ranks
// are connected.
nccl::UniqueId make_unique_id(const Nccl& nccl);

// All ranks call this at once, each on the thread whose device is the rank's GPU. Throws
// TransportError, Timeout, or what the interrupt throws.
//
// A message of 0 bytes is neither sent nor waited for. A failure of end() or check() is final: NCCL
// is aborted before the error is thrown, so that nothing touches the messages' memory any more, and
// every later call throws it again. The destructor waits for enqueued work and closes the
// communicator, or aborts. CUDA graphs that hold messages must be destroyed by then, since NCCL
// waits for them.
std::unique_ptr<Messages> make_nccl_messages(const Nccl& nccl, const nccl::UniqueId& id,
                                             const NcclSettings& settings);

}  // namespace gradwire::cuda
