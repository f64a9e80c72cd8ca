#include "gradwire/base/error.h"

#include <system_error>

namespace gradwire {

std::string system_message(const std::string& what, int code) {
  return what + ": " + std::generic_category().message(code);
}

}  // namespace gradwire
