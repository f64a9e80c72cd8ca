// Messages over NCCL's point-to-point calls: a communicator that does not block, one NCCL group for
// each end(). NCCL's own environment variables (NCCL_MAX_CTAS, NCCL_SOCKET_IFNAME, …) do the rest.
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
  // Until all ranks are there, and until each end() is on its stream: a first message between two
  // ranks waits for both.
  double timeout_seconds = 30;
  // For an abort, and for what the destructor waits for; NCCL then ends on a thread that is left
  // alone.
  double ending_seconds = 10;
  WaitLimit::Interrupt interrupt = nullptr;
  // Makes the rank's GPU that of the calling thread; for the threads that end a communicator.
  std::function<void()> use_device = nullptr;
  // Called first in each abort.
  std::function<void()> before_abort = nullptr;
};

// What rank 0 makes and all ranks need. Its process must live until they have met.
nccl::UniqueId make_unique_id(const Nccl& nccl);

// All ranks at once, each on the thread whose GPU is its own. Throws TransportError, Timeout, or
// what the interrupt throws.
//
// A message of 0 bytes is not sent, nor waited for. A failure of end() or check() is final: NCCL is
// aborted before it is thrown, so that nothing touches the messages' memory any more, and it is
// thrown again by every later call. The destructor waits for what is enqueued and lets go, or
// aborts; CUDA graphs that hold messages must be gone by then, since NCCL waits for them.
std::unique_ptr<Messages> make_nccl_messages(const Nccl& nccl, const nccl::UniqueId& id,
                                             NcclSettings settings);

}  // namespace gradwire::cuda
