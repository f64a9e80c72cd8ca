// A libibverbs of this process alone, for tests without an RDMA device: queue pairs write into each
// other's memory at once, and any verb can be made to fail. The program that tests it links nothing
// of it: it loads it, as gradwire does, and reaches these switches by fake_ibverbs().
#pragma once

#include <dlfcn.h>

#include <stdexcept>

#include "gradwire/transport/rdma/verbs_abi.h"

namespace gradwire::transport {

struct FakeIbverbs {
  // What the next calls see, until reset(): devices (-1: a kernel without RDMA), and of each its
  // ports; the link layer (ibv::LinkLayer) and state (ibv::PortState) of each port.
  struct Hardware {
    int devices = 1;
    int ports = 1;
    int link_layer = 2;
    int port_state = 4;
    int active_mtu = 5;
    int transport_type = 0;
    unsigned most_inline = 256;
    unsigned max_message = 1U << 23;
    bool has_ipv4 = true;
  };
  void (*reset)();
  Hardware* (*hardware)();
  // The verb fails with this errno, from the next call but `after` on.
  void (*fail)(const char* verb, int error, int after);
  // The next write of any queue pair completes with this status in place of being done.
  void (*break_next)(int status);
  // As if the peer of every queue pair had sent this word.
  void (*inject)(unsigned word);
  // What is open or registered, of all kinds: 0 when all was given back.
  int (*alive)();
  // Calls of a verb since reset(); of "post_send inline", with bytes by value, of "post_send
  // signaled", that ask for a completion; and of "overflow", completions that found no room.
  int (*calls)(const char* verb);
  // What a queue pair was last asked to become on its way to this state (ibv::QpState).
  ibv::QpAttr (*modified)(int state);
};

inline const FakeIbverbs& fake_ibverbs() {
  static const FakeIbverbs* const found = [] {
    void* library = ::dlopen(GRADWIRE_FAKE_IBVERBS, RTLD_NOW | RTLD_LOCAL);
    void* table = library == nullptr ? nullptr : ::dlsym(library, "fake_ibverbs_table");
    if (table == nullptr) throw std::runtime_error("no fake libibverbs: " GRADWIRE_FAKE_IBVERBS);
    return static_cast<const FakeIbverbs*>(table);
  }();
  return *found;
}

}  // namespace gradwire::transport
