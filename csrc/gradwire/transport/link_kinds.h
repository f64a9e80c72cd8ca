// The kinds of link; transport.cc lists them.
#pragma once

#include <memory>

#include "gradwire/transport/transport.h"

namespace gradwire::transport {

std::unique_ptr<Transport> make_inproc(const Options& options);
std::unique_ptr<Transport> make_shm(const Options& options);
std::unique_ptr<Transport> make_rdma(const Options& options);
std::unique_ptr<Transport> make_tcp(const Options& options);
std::unique_ptr<Transport> make_emulated(const Options& options);

// Probes what inproc and shm both need.
Viability probe_shared_memory(const Options& options);
// If the options have no devices: whether this host has any.
Viability probe_rdma(const Options& options);

}  // namespace gradwire::transport
