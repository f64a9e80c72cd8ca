// Libraries that are loaded at run time, so that one build works with and without them.
#pragma once

#include <dlfcn.h>

#include <string>

namespace gradwire {

// The address of a function in such a library, of whatever type it is assigned to.
struct Symbol {
  void* address = nullptr;

  template <typename Function>
  operator Function*() const noexcept {
    return reinterpret_cast<Function*>(address);
  }
};

// Returns the last error of dlopen(), dlsym() or dlvsym(), for messages.
inline std::string loader_error() {
  const char* said = ::dlerror();
  return said == nullptr ? "no reason given" : said;
}

}  // namespace gradwire
