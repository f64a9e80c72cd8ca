// The cost model by which algorithms are chosen until the ranks have measured one.
#pragma once

#include <string_view>

#include "gradwire/schedule/cost.h"

namespace gradwire::exec {

// Returns schedule::default_model() with what the transports that connect ranks of one host and of
// different hosts, and each codec, say of their own speed. Throws InvalidArgument for an unknown
// transport.
schedule::CostModel built_in_model(std::string_view within, std::string_view between, int cores);

}  // namespace gradwire::exec
