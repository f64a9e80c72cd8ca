#include "gradwire/serve/shard/statistics.h"

#include <algorithm>
#include <cstdio>

#include "gradwire/codec/spec.h"
#include "gradwire/serve/wire/message.h"

namespace gradwire::serve {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char each : text) {
    if (each == '"' || each == '\\') out += '\\';
    if (static_cast<unsigned char>(each) >= ' ') {
      out += each;
      continue;
    }
    char code[8];
    std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(each));
    out += code;
  }
  return out + "\"";
}

template <typename Values, typename Text>
std::string list(const Values& values, Text text) {
  std::string out = "[";
  for (const auto& each : values) (out += out.size() > 1 ? ", " : "") += text(each);
  return out + "]";
}

}  // namespace

void Statistics::count_staleness(std::uint64_t versions) {
  ++staleness[std::min<std::uint64_t>(versions, kMostStaleness)];
  sum_of_staleness += static_cast<double>(versions);
  most_staleness = std::max(most_staleness, versions);
}

void Statistics::count_gone(std::string client) {
  if (gone.size() == kMostGone) gone.erase(gone.begin());
  gone.push_back(std::move(client));
}

std::string Statistics::json(std::uint64_t version, const std::vector<std::string>& clients) const {
  const auto field = [](const char* name, std::uint64_t value) {
    return str_cat(", \"", name, "\": ", value);
  };
  std::uint64_t counted = 0;
  std::size_t bins = 0;
  for (std::size_t i = 0; i < staleness.size(); ++i) {
    counted += staleness[i];
    if (staleness[i] > 0) bins = i + 1;
  }
  const double mean = counted == 0 ? 0 : sum_of_staleness / static_cast<double>(counted);
  const std::span<const std::uint64_t> used = std::span(staleness).first(bins);
  return "{\"version\": " + (version == kNoVersion ? "null" : std::to_string(version)) +
         field("pushes", pushes) + field("partial", partial) + field("stale", stale) +
         field("not_finite", not_finite) + field("pulls", pulls) + field("received", received) +
         field("sent", sent) + field("most_staleness", most_staleness) +
         field("last_batch", last_batch) + ", \"mean_staleness\": " + codec::shortest(mean) +
         ", \"staleness\": " + list(used, [](std::uint64_t each) { return std::to_string(each); }) +
         ", \"clients\": " + list(clients, quoted) + ", \"gone\": " + list(gone, quoted) + "}";
}

}  // namespace gradwire::serve
