// Text from values, for messages.
#pragma once

#include <string>
#include <type_traits>

namespace gradwire {

// Returns the values one after the other: text as it is, numbers in decimal.
template <typename... Values>
std::string str_cat(const Values&... values) {
  std::string out;
  const auto append = [&out](const auto& value) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(value)>>)
      out += std::to_string(value);
    else
      out += value;
  };
  (append(values), ...);
  return out;
}

}  // namespace gradwire
