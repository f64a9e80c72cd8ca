// The first exchange on every link: both ends say what they are and refuse to disagree.
#pragma once

#include "gradwire/transport/socket.h"
#include "gradwire/transport/transport.h"

namespace gradwire::transport {

// Throws InvalidArgument where the two ends' Options differ (with both values), TransportError
// where the other end is not the one expected, Timeout where it is silent.
void agree(int socket, const LinkId& link, const Options& options, const Deadline& deadline);

}  // namespace gradwire::transport
