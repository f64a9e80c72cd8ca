#include "gradwire/transport/ways/ways.h"

#include <algorithm>
#include <utility>

#include "gradwire/transport/connection.h"

namespace gradwire::transport {
namespace {

constexpr std::size_t kMostNews = 64;  // that nobody has read

}  // namespace

void Ways::leave_out(int way, const void* link, const std::string& why) {
  const std::lock_guard lock(mutex_);
  auto& links = left_out_by_[at(way)];
  if (links.empty() && news_.size() < kMostNews) news_.push_back({way, false, why});
  links.insert(link);
}

void Ways::use_again(int way, const void* link, bool silently) {
  const std::lock_guard lock(mutex_);
  auto& links = left_out_by_[at(way)];
  const bool last = links.erase(link) == 1 && links.empty();
  if (last && !silently && news_.size() < kMostNews) news_.push_back({way, true, {}});
}

std::optional<WayNews> Ways::next() {
  const std::lock_guard lock(mutex_);
  if (news_.empty()) return std::nullopt;
  WayNews news = std::move(news_.front());
  news_.pop_front();
  return news;
}

StreamCounts Connection::counts() const noexcept {
  const auto further = std::ranges::count(more, false, &Connection::acknowledges);
  return {1 + static_cast<int>(further), ways == nullptr ? 1 : ways->count()};
}

}  // namespace gradwire::transport
