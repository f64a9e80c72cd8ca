#pragma once

namespace gradwire::exec {

// Seconds in a codec, on the threads that ran it.
struct CodecTime {
  double encode = 0;
  double decode = 0;
};

}  // namespace gradwire::exec
