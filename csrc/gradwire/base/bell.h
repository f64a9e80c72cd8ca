// Bell: an eventfd, by which threads wake one that polls it.
#pragma once

#include <sys/eventfd.h>

#include <cerrno>

#include "gradwire/base/error.h"
#include "gradwire/base/fd.h"

namespace gradwire {

class Bell {
 public:
  Bell() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!fd_.valid()) throw Error(system_message("eventfd", errno));
  }

  // Returns a descriptor that is readable from ring() to clear().
  int fd() const noexcept { return fd_.get(); }
  void ring() const noexcept { static_cast<void>(::eventfd_write(fd_.get(), 1)); }
  void clear() const noexcept {
    eventfd_t rings = 0;
    static_cast<void>(::eventfd_read(fd_.get(), &rings));
  }
  void close() noexcept { fd_.reset(); }

 private:
  UniqueFd fd_;
};

}  // namespace gradwire
