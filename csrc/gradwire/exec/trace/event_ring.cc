#include "gradwire/exec/trace/event_ring.h"

#include <algorithm>
#include <bit>

namespace gradwire::exec {

EventRing::EventRing(std::size_t capacity)
    : slots_(std::bit_ceil(std::max<std::size_t>(capacity, 2))) {}

void EventRing::add(const Event& event) noexcept {
  using Words = std::array<std::uint64_t, kWords>;
  const std::uint64_t number = added_.load(std::memory_order_relaxed);
  Slot& slot = slots_[number & (slots_.size() - 1)];
  const auto words = std::bit_cast<Words>(event);
  for (std::size_t i = 0; i < kWords; ++i) slot[i].store(words[i], std::memory_order_release);
  added_.store(number + 1, std::memory_order_release);
}

std::vector<Event> EventRing::read(std::uint64_t& dropped) const {
  const std::uint64_t end = added();
  std::uint64_t begin = end - std::min<std::uint64_t>(end, slots_.size());
  std::vector<Event> events(end - begin);
  for (std::uint64_t number = begin; number < end; ++number) {
    std::array<std::uint64_t, kWords> words;
    const Slot& slot = slots_[number & (slots_.size() - 1)];
    for (std::size_t i = 0; i < kWords; ++i) words[i] = slot[i].load(std::memory_order_acquire);
    events[number - begin] = std::bit_cast<Event>(words);
  }
  // The writer may be at the event after the last that it counted, in the slot of an earlier one.
  const std::uint64_t next = added() + 1;
  const std::uint64_t whole = next - std::min<std::uint64_t>(next, slots_.size());
  if (whole > begin) {
    const std::uint64_t torn = std::min(whole, end) - begin;
    events.erase(events.begin(), events.begin() + static_cast<std::ptrdiff_t>(torn));
    begin += torn;
  }
  dropped = begin;
  return events;
}

}  // namespace gradwire::exec
