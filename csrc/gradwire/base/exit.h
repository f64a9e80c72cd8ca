#pragma once

namespace gradwire {

// Makes this process, which is about to end, end with `status` where it would end with success; the
// handlers of atexit() all run.
void end_with(int status) noexcept;

}  // namespace gradwire
