#include "gradwire/exec/plan/gather_algorithm.h"

#include <string>

#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace {

constexpr std::string_view kName = "gather";

[[noreturn]] void refuse_to_add(const Request& request, const std::string& what,
                                const std::string& remedy) {
  const std::string codec =
      request.codec ? request.codec->name() : std::string(request.codec_label);
  throw ScheduleError("codec '" + codec + "': payloads that are gathered are not added on their " +
                      "way, as " + what + " would do; " + remedy);
}

}  // namespace

bool is_gather(std::string_view algorithm) {
  return algorithm == kName || (algorithm.starts_with("gather(") && algorithm.ends_with(')'));
}

std::string_view gather_algorithm(std::string_view algorithm) {
  if (algorithm == kName) return "auto";
  constexpr std::size_t kOpening = kName.size() + 1;
  return algorithm.substr(kOpening, algorithm.size() - kOpening - 1);
}

std::string_view gather_algorithm(const Request& request) {
  const std::string_view algorithm = request.algorithm;
  if (request.schedule != nullptr)
    refuse_to_add(request, "schedule '" + request.schedule->name + "'",
                  request.payloads ? "leave the schedule out" : "give the schedule or 'gather'");
  if (algorithm == "auto") return algorithm;
  if (!is_gather(algorithm))
    refuse_to_add(request, "algorithm '" + std::string(algorithm) + "'",
                  "use auto, gather or gather(ring)");
  return gather_algorithm(algorithm);
}

}  // namespace gradwire::exec
