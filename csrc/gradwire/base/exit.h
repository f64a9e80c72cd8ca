#pragma once

namespace gradwire {

// Makes this process, which is about to exit, exit with `status` where it would exit with success.
// All atexit() handlers still run.
void end_with(int status) noexcept;

}  // namespace gradwire
