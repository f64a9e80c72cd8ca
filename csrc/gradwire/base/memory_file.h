// Shared memory behind a descriptor, without a name in any file system, which can be sealed.
#pragma once

#include <linux/memfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gradwire/base/fd.h"

namespace gradwire {

// Not valid where the kernel makes none; errno says why. A system call: glibc wraps it from 2.27 on
// only, and wheels are for older ones too.
inline UniqueFd make_memory_file(const char* name) noexcept {
  return UniqueFd(
      static_cast<int>(::syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING)));
}

}  // namespace gradwire
