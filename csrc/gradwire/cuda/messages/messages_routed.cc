#include "gradwire/cuda/messages/messages_routed.h"

#include <algorithm>
#include <ranges>

namespace gradwire::cuda {

RoutedMessages::RoutedMessages(std::vector<std::unique_ptr<Messages>> transports,
                               std::vector<Route> routes)
    : transports_(std::move(transports)), routes_(std::move(routes)) {
  for (const auto& each : transports_) {
    if (!name_.empty()) name_ += '+';
    name_ += each->name();
    if (transports_.size() > 1) each->join_others();
  }
}

void RoutedMessages::begin() {
  for (const auto& each : transports_) each->begin();
}

void RoutedMessages::send(const std::byte* data, std::size_t bytes, Rank peer,
                          std::span<const Slotted> layout) {
  transports_.at(route(peer).transport)->send(data, bytes, route(peer).rank, layout);
}

void RoutedMessages::receive(std::byte* data, std::size_t bytes, Rank peer,
                             std::span<const Slotted> layout) {
  transports_.at(route(peer).transport)->receive(data, bytes, route(peer).rank, layout);
}

// Ends its transports in the same order on all ranks, so that no rank waits for a transport that
// another rank ends later.
void RoutedMessages::end(Stream stream) {
  for (const auto& each : transports_) each->end(stream);
}

void RoutedMessages::check() {
  for (const auto& each : transports_) each->check();
}

// The first transport last: what waits for its abort then finds the others aborted.
void RoutedMessages::abort() noexcept {
  for (const auto& each : std::views::reverse(transports_)) each->abort();
}

bool RoutedMessages::rest() noexcept {
  bool all = true;
  for (const auto& each : transports_) all = each->rest() && all;
  return all;
}

void RoutedMessages::set_loss_word(std::uint32_t* word) {
  for (const auto& each : transports_) each->set_loss_word(word);
}

}  // namespace gradwire::cuda
