#include "gradwire/codec/spec.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "gradwire/base/error.h"

namespace gradwire::codec {
namespace {

std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

template <typename Number>
bool parse(const std::string& text, Number& value) {
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, value);
  return code == std::errc() && stop == end;
}

}  // namespace

std::string shortest(double value) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

Parameters::Parameters(std::string_view name, std::string_view text, std::string_view what)
    : name_(name), owner_(std::string(what) + " " + name_), canonical_(name) {
  if (text.ends_with(',')) throw InvalidArgument(owner_ + ": nothing follows the last ','");
  while (!text.empty()) {
    const std::string_view pair = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), pair.size() + 1));
    const std::size_t equals = pair.find('=');
    if (equals == 0 || equals == std::string_view::npos)
      throw InvalidArgument(owner_ + ": " + quoted(pair) + " is not key=value");
    const std::string key(pair.substr(0, equals));
    const auto same = [&](const auto& other) { return other.first == key; };
    if (std::any_of(given_.begin(), given_.end(), same))
      throw InvalidArgument(owner_ + ": parameter " + quoted(key) + " is given twice");
    given_.emplace_back(key, pair.substr(equals + 1));
  }
}

std::string Parameters::take(std::string_view key) {
  known_ += (known_.empty() ? "" : ", ") + std::string(key);
  const auto found = std::find_if(given_.begin(), given_.end(),
                                  [&](const auto& pair) { return pair.first == key; });
  if (found == given_.end()) return "";
  const std::string text = found->second;
  given_.erase(found);
  if (text.empty()) refuse(key, text, "empty");
  return text;
}

void Parameters::refuse(std::string_view key, const std::string& text,
                        const std::string& reason) const {
  throw InvalidArgument(owner_ + ": " + std::string(key) + "=" + quoted(text) + " is " + reason);
}

void Parameters::note(std::string_view key, const std::string& value) {
  canonical_ += canonical_ == name_ ? ':' : ',';
  canonical_.append(key) += '=' + value;
}

double Parameters::number(std::string_view key, double fallback) {
  const std::string text = take(key);
  if (text.empty()) return fallback;
  double value = 0;
  if (!parse(text, value)) refuse(key, text, "not a number");
  if (value != fallback) note(key, shortest(value));
  return value;
}

std::uint64_t Parameters::whole(std::string_view key, std::uint64_t fallback, std::uint64_t least,
                                std::uint64_t most) {
  const std::string text = take(key);
  if (text.empty()) return fallback;
  std::uint64_t value = 0;
  if (!parse(text, value) || value < least || value > most)
    refuse(key, text,
           "not an integer from " + std::to_string(least) + " to " + std::to_string(most));
  if (value != fallback) note(key, std::to_string(value));
  return value;
}

double Parameters::real(std::string_view key, double fallback, double least, double most) {
  const std::string text = take(key);
  if (text.empty()) return fallback;
  double value = 0;
  if (!parse(text, value) || !(value >= least && value <= most))
    refuse(key, text, "not a number from " + shortest(least) + " to " + shortest(most));
  if (value != fallback) note(key, shortest(value));
  return value;
}

std::string Parameters::choice(std::string_view key,
                               std::initializer_list<std::string_view> choices) {
  const std::string text = take(key);
  if (text.empty()) return std::string(*choices.begin());
  if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
    std::string known;
    for (const std::string_view each : choices) (known += known.empty() ? "" : ", ") += each;
    refuse(key, text, "none of: " + known);
  }
  if (text != *choices.begin()) note(key, text);
  return text;
}

std::size_t block_of(Parameters& parameters, std::size_t most) {
  const std::uint64_t block = parameters.whole("block", 1024, 32, most);
  if (block % 32 != 0) parameters.refuse("block", std::to_string(block), "not a multiple of 32");
  return block;
}

RoundingChoice rounding_of(Parameters& parameters) {
  const bool stochastic = parameters.choice("rounding", {"nearest", "stochastic"}) == "stochastic";
  const std::uint64_t seed = parameters.whole("seed", 0, 0, std::uint64_t{1} << 53);
  if (seed != 0 && !stochastic)
    parameters.refuse("seed", std::to_string(seed), "of no use without rounding=stochastic");
  return {stochastic, seed};
}

void Parameters::finish() const {
  if (given_.empty()) return;
  throw InvalidArgument(owner_ + ": unknown parameter " + quoted(given_.front().first) +
                        "; it takes " + (known_.empty() ? "none" : known_));
}

void check_room(const Codec& codec, std::size_t size, std::size_t needed, std::size_t n) {
  if (size >= needed) return;
  throw InvalidArgument("codec " + codec.name() + ": " + std::to_string(n) + " elements need " +
                        std::to_string(needed) + " bytes, there are " + std::to_string(size));
}

}  // namespace gradwire::codec
