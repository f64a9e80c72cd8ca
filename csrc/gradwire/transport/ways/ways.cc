#include "gradwire/transport/ways/ways.h"

#include <algorithm>
#include <utility>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

constexpr std::size_t kMostNews = 64;  // that nobody has read

}  // namespace

Ways::Ways(int count) {
  if (count < 1 || count > kMostWays) throw InvalidArgument("so many ways to a peer are not used");
  left_out_by_.resize(at(count));
  renewals_.resize(at(count));
}

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

// ---- Making a way anew -------------------------------------------------------------------------

void Ways::end(int way, std::uint32_t generation) {
  const std::lock_guard lock(mutex_);
  Renewal& of = renewals_[at(way)];
  if (of.generation == generation) of.ended = true;
}

void Ways::finish() {
  const std::lock_guard lock(mutex_);
  finished_ = true;
}

bool Ways::finished() {
  const std::lock_guard lock(mutex_);
  return finished_;
}

std::vector<int> Ways::ended() {
  const std::lock_guard lock(mutex_);
  std::vector<int> found;
  for (int way = 0; way < count(); ++way)
    if (renewals_[at(way)].ended) found.push_back(way);
  return found;
}

std::uint32_t Ways::generation(int way) {
  const std::lock_guard lock(mutex_);
  return renewals_.at(at(way)).generation;
}

void Ways::renew(int way, std::uint32_t generation, std::vector<Connection> sockets) {
  Renewal made;
  made.generation = generation;
  for (Connection& each : sockets) {
    each.way = way;
    each.generation = generation;
    made.parts[each.part].push_back(std::move(each));
  }
  const std::lock_guard lock(mutex_);
  Renewal& former = renewals_.at(at(way));
  if (generation > former.generation) std::swap(former, made);
}

std::vector<Connection> Ways::take(int way, int part) {
  const std::lock_guard lock(mutex_);
  auto& parts = renewals_[at(way)].parts;
  const auto found = parts.find(part);
  if (found == parts.end()) return {};
  return std::move(parts.extract(found).mapped());
}

StreamCounts Connection::counts() const noexcept {
  const auto further = std::ranges::count(more, false, &Connection::acknowledges);
  return {1 + static_cast<int>(further), ways == nullptr ? 1 : ways->count()};
}

}  // namespace gradwire::transport
