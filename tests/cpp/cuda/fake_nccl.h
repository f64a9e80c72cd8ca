// A libnccl of this process alone, for tests without a GPU: its ranks are threads, a message is
// copied when both of its ends are posted, and any call can be made to fail, to wait or to hang.
// What a communicator that blocks begins is over when the call returns; an abort makes it return.
// The program that tests it links nothing of it: it loads it, as gradwire does, and reaches these
// switches by fake_nccl().
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>

#include "gradwire/cuda/api.h"

namespace gradwire::cuda {

struct FakeNccl {
  // Everything below as if it had never been called.
  void (*reset)();
  // Copies are enqueued on the receiver's stream, after what is on the sender's, by this table, and
  // collectives on rank 0's; null (as at first): copies are made at once, in host memory, and there
  // are no collectives.
  void (*copy_by)(const Api* api);
  // What a call begins is in progress for so many more questions.
  void (*in_progress)(int questions);
  // Calls say success of what they have but begun, as some versions of NCCL do.
  void (*hasten)();
  // The call returns this result, from the next one but `after` on. Of "ncclCommGetAsyncError":
  // that is what it says of the communicator.
  void (*fail)(const char* call, int result, int after);
  // What the call begins is in progress until the communicator is aborted.
  void (*hang)(const char* call);
  // The call itself takes so many milliseconds, in which its communicator may not be ended.
  void (*linger)(const char* call, int milliseconds);
  // The call itself does not return until then; "ncclCommAbort": until reset().
  void (*block)(const char* call);
  // Calls since reset(); of "misuse", what NCCL forbids.
  int (*calls)(const char* call);
  // Communicators that were neither destroyed nor aborted; groups that were begun and not ended.
  int (*alive)();
  int (*open_groups)();
  // The elements of the last ncclSend or ncclRecv.
  std::size_t (*last_count)();
  // Threads that have ended a group since reset().
  int (*group_threads)();
};

inline const FakeNccl& fake_nccl() {
  static const FakeNccl* const found = [] {
    void* library = ::dlopen(GRADWIRE_FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);
    void* table = library == nullptr ? nullptr : ::dlsym(library, "fake_nccl_table");
    if (table == nullptr) throw std::runtime_error("no fake libnccl: " GRADWIRE_FAKE_NCCL);
    return static_cast<const FakeNccl*>(table);
  }();
  return *found;
}

}  // namespace gradwire::cuda
