#include "gradwire/exec/trace/totals.h"

#include <new>
#include <string_view>

namespace gradwire::exec {
namespace {

std::string_view codec_of(const Request& request) {
  if (!request.codec_label.empty()) return request.codec_label;
  return request.codec ? std::string_view(request.codec->name()) : std::string_view("none");
}

}  // namespace

std::uint32_t Totals::series_of(const Request& request) noexcept {
  const auto collective = static_cast<std::uint32_t>(request.collective);
  const std::string_view codec = codec_of(request);
  if (codec == "none") return collective;
  const std::size_t named = named_.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < named; ++i)
    if (names_[i].collective == request.collective && names_[i].codec == codec)
      return static_cast<std::uint32_t>(kNamed + i);
  if (named == names_.size()) return kCollectives + collective;
  try {
    names_[named] = {request.collective, std::string(codec)};
  } catch (const std::bad_alloc&) {
    return kCollectives + collective;
  }
  named_.store(named + 1, std::memory_order_release);
  return static_cast<std::uint32_t>(kNamed + named);
}

std::vector<Totals::NamedCalls> Totals::calls() const {
  std::vector<NamedCalls> found;
  const auto add = [&](Collective collective, const std::string& codec, const Calls& counts) {
    if (counts.calls.read() > 0) found.push_back({collective, codec, &counts});
  };
  for (std::size_t i = 0; i < kNamed; ++i)
    add(static_cast<Collective>(i % kCollectives), i < kCollectives ? "none" : "other", calls_[i]);
  const std::size_t named = named_.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < named; ++i)
    add(names_[i].collective, names_[i].codec, calls_[kNamed + i]);
  return found;
}

void Totals::fail(const Failure& failure) noexcept {
  const auto peer = static_cast<std::uint32_t>(failure.job_peer + 1);
  failure_ = std::uint64_t{peer} << 8 | static_cast<std::uint64_t>(failure.kind);
}

std::optional<Totals::Failure> Totals::failure() const noexcept {
  const std::uint64_t found = failure_;
  if (found == 0) return std::nullopt;
  return Failure{static_cast<transport::FailureKind>(found & 0xff),
                 static_cast<Rank>(found >> 8) - 1};
}

}  // namespace gradwire::exec
