// The first exchange on every link: both ends say what they are and refuse to disagree. In two
// halves, so that a rank can greet all its peers before it waits for any of them.
#pragma once

#include "gradwire/transport/socket.h"
#include "gradwire/transport/transport.h"

namespace gradwire::transport {

// Fits into every fresh socket: does not wait.
void send_hello(int socket, const LinkId& link, const Options& options);
// Throws InvalidArgument where the two ends' Options differ (with both values), TransportError
// where the other end is not the one expected, Timeout where it is silent.
void receive_hello(int socket, const LinkId& link, const Options& options,
                   const WaitLimit& wait_limit);

}  // namespace gradwire::transport
