// The first exchange on every link: both ends send their LinkOptions and the numbers of streams and
// ways, which must be the same. It has two halves, so that a rank can send to all its peers before
// it waits for any of them.
#pragma once

#include "gradwire/transport/socket.h"
#include "gradwire/transport/transport.h"

namespace gradwire::transport {

// Does not block: the message fits into the send buffer of every fresh socket.
void send_hello(const Stream& to, const LinkId& link, const LinkOptions& options,
                StreamCounts counts = {});
// Checks the other end's hello. Throws InvalidArgument where the two ends differ (with
// both values), TransportError where the other end is not the expected one, Timeout where it is
// silent.
void receive_hello(const Stream& from, const LinkId& link, const LinkOptions& options,
                   const WaitLimit& wait_limit, StreamCounts counts = {});

}  // namespace gradwire::transport
