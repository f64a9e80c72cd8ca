#pragma once

namespace gradwire {

// Makes this process exit with `status` where it would exit with 0. To be called when it is about
// to exit; all atexit() handlers still run.
void end_with(int status) noexcept;

}  // namespace gradwire
