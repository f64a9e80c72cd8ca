// Shared memory with a file descriptor and no name in any file system, which can be sealed.
#pragma once

#include <linux/memfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gradwire/base/fd.h"

namespace gradwire {

// Returns an invalid descriptor, and sets errno, where the kernel makes none. A system call, since
// glibc wraps it from 2.27 on and the wheels run with older versions.
inline UniqueFd make_memory_file(const char* name) noexcept {
  return UniqueFd(
      static_cast<int>(::syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING)));
}

}  // namespace gradwire
