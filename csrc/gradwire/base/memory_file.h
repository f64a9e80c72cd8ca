// Shared memory behind a file descriptor, without a name in any file system. It can be sealed.
#pragma once

#include <linux/memfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gradwire/base/fd.h"

namespace gradwire {

// Returns an invalid descriptor where the kernel makes none; errno says why. This is a system call,
// because glibc wraps it only from 2.27 on and the wheels run on older versions too.
inline UniqueFd make_memory_file(const char* name) noexcept {
  return UniqueFd(
      static_cast<int>(::syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING)));
}

}  // namespace gradwire
