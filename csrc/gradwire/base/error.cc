#include "gradwire/base/error.h"

#include <sstream>
#include <system_error>

namespace gradwire {

std::string system_message(const std::string& what, int code) {
  return what + ": " + std::generic_category().message(code);
}

std::string seconds_text(double seconds) {
  std::ostringstream text;
  text << seconds << " s";
  return text.str();
}

}  // namespace gradwire
