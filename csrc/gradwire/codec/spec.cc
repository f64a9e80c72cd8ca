#include "gradwire/codec/spec.h"

#include <algorithm>
#include <charconv>

#include "gradwire/base/error.h"

namespace gradwire::codec {
namespace {

std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

}  // namespace

Parameters::Parameters(std::string_view codec, std::string_view text) : codec_(codec) {
  while (!text.empty()) {
    const std::string_view pair = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), pair.size() + 1));
    const std::size_t equals = pair.find('=');
    if (equals == 0 || equals == std::string_view::npos)
      throw InvalidArgument("codec " + codec_ + ": " + quoted(pair) + " is not key=value");
    const std::string key(pair.substr(0, equals));
    const auto same = [&](const auto& other) { return other.first == key; };
    if (std::any_of(given_.begin(), given_.end(), same))
      throw InvalidArgument("codec " + codec_ + ": parameter " + quoted(key) + " is given twice");
    given_.emplace_back(key, pair.substr(equals + 1));
  }
}

double Parameters::number(std::string_view key, double fallback) {
  known_ += (known_.empty() ? "" : ", ") + std::string(key);
  const auto found = std::find_if(given_.begin(), given_.end(),
                                  [&](const auto& pair) { return pair.first == key; });
  if (found == given_.end()) return fallback;
  const std::string text = found->second;
  given_.erase(found);
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, value);
  if (code != std::errc() || stop != end)
    throw InvalidArgument("codec " + codec_ + ": " + std::string(key) + "=" + quoted(text) +
                          " is not a number");
  return value;
}

void Parameters::finish() const {
  if (given_.empty()) return;
  throw InvalidArgument("codec " + codec_ + ": unknown parameter " + quoted(given_.front().first) +
                        "; it takes " + (known_.empty() ? "none" : known_));
}

void check_room(const Codec& codec, std::size_t size, std::size_t needed, std::size_t n) {
  if (size >= needed) return;
  throw InvalidArgument("codec " + codec.name() + ": " + std::to_string(n) + " elements need " +
                        std::to_string(needed) + " bytes, there are " + std::to_string(size));
}

}  // namespace gradwire::codec
