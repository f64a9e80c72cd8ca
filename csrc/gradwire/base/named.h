// Choices by name.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "gradwire/base/error.h"

namespace gradwire {

// Returns the entry of a list that has the name. Throws InvalidArgument, which lists the known
// ones, where there is none. `what` says what is named: "dtype". `name_of` takes an entry.
template <typename List, typename NameOf = std::identity>
const auto& find_named(const char* what, const List& list, std::string_view name,
                       NameOf name_of = {}) {
  std::string known;
  for (const auto& each : list) {
    const std::string_view its = std::invoke(name_of, each);
    if (its == name) return each;
    (known += known.empty() ? "" : ", ") += its;
  }
  throw InvalidArgument("unknown " + std::string(what) + " '" + std::string(name) +
                        "'; use one of: " + known);
}

}  // namespace gradwire
