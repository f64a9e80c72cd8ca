#include "gradwire/transport/quantity.h"

#include <algorithm>
#include <charconv>

#include "gradwire/base/error.h"

namespace gradwire::transport {

double parse_quantity(std::string_view text, const Quantity& quantity) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(end, text.data() + text.size());
  const auto found = std::ranges::find(quantity.units, unit, [](auto& each) { return each.first; });
  if (error != std::errc() || found == quantity.units.end())
    throw InvalidArgument(str_cat("'", text, "' is no ", quantity.name));
  number *= found->second;
  if (!(number >= quantity.least && number <= quantity.most))
    throw InvalidArgument(str_cat("the ", quantity.name, " is not within ", quantity.range));
  return number;
}

}  // namespace gradwire::transport
