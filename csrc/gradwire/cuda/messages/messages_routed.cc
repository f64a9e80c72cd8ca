#include "gradwire/cuda/messages/messages_routed.h"

#include <algorithm>
#include <ranges>

namespace gradwire::cuda {

RoutedMessages::RoutedMessages(std::vector<std::unique_ptr<Messages>> ways,
                               std::vector<Route> routes)
    : ways_(std::move(ways)), routes_(std::move(routes)) {
  for (const auto& each : ways_) {
    if (!name_.empty()) name_ += '+';
    name_ += each->name();
    if (ways_.size() > 1) each->join_others();
  }
}

void RoutedMessages::begin() {
  for (const auto& each : ways_) each->begin();
}

void RoutedMessages::send(const std::byte* data, std::size_t bytes, Rank peer,
                          std::span<const Slotted> layout) {
  ways_.at(route(peer).way)->send(data, bytes, route(peer).rank, layout);
}

void RoutedMessages::receive(std::byte* data, std::size_t bytes, Rank peer,
                             std::span<const Slotted> layout) {
  ways_.at(route(peer).way)->receive(data, bytes, route(peer).rank, layout);
}

// Ends its transports in the same order on all ranks, so that no rank waits for a transport that
// another rank ends later.
void RoutedMessages::end(Stream stream) {
  for (const auto& each : ways_) each->end(stream);
}

void RoutedMessages::check() {
  for (const auto& each : ways_) each->check();
}

// The first way last: what waits for its abort then finds the others aborted.
void RoutedMessages::abort() noexcept {
  for (const auto& each : std::views::reverse(ways_)) each->abort();
}

bool RoutedMessages::rest() noexcept {
  bool all = true;
  for (const auto& each : ways_) all = each->rest() && all;
  return all;
}

void RoutedMessages::tell_losses(std::uint32_t* word) {
  for (const auto& each : ways_) each->tell_losses(word);
}

}  // namespace gradwire::cuda
