#include "gradwire/cuda/messages/messages_host.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "gradwire/base/error.h"

namespace gradwire::cuda {
namespace {

constexpr double kLastSeconds = 5;

std::size_t tables_of(std::span<const Slotted> layout) {
  std::size_t bytes = 0;
  for (const Slotted& each : layout) bytes += sizeof(std::uint32_t) * each.units;
  return bytes;
}

// Calls visit(size, slot, bytes of the slot) for each unit of a message in its slots; sizes are
// loaded once.
template <typename Visit>
void each_unit(std::byte* message, std::span<const Slotted> layout, Visit visit) {
  for (const Slotted& each : layout) {
    std::byte* slot = message + each.table_bytes();
    for (std::uint64_t u = 0; u < each.units; ++u, slot += each.slot_bytes) {
      std::uint32_t size = 0;
      std::memcpy(&size, message + u * sizeof size, sizeof size);
      visit(size, slot, each.slot_bytes);
    }
    message += each.bytes();
  }
}

}  // namespace

HostFunctionQueue& HostFunctionQueue::here(const Api& api) {
  static std::mutex mutex;
  static auto* const all =
      new std::map<std::pair<const Api*, int>, HostFunctionQueue>;  // never destroyed
  int device = 0;
  check(api, api.get_device(&device), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  return all->try_emplace({&api, device}, api).first->second;
}

void HostFunctionQueue::enqueue(Stream stream, void (*function)(void*), void* argument) {
  const std::lock_guard lock(mutex_);
  if (recorded_) check(api_, api_.wait(stream, last_.get()), "cudaStreamWaitEvent");
  check(api_, api_.call_host(stream, function, argument), "cudaLaunchHostFunc");
  check(api_, api_.record(last_.get(), stream), "cudaEventRecord");
  recorded_ = true;
}

HostMessages::HostMessages(const Api& api, exec::Communicator& carrier, double timeout,
                           HostFunctionQueue& functions)
    : api_(api),
      carrier_(carrier),
      timeout_(timeout),
      functions_(functions),
      pinned_(api, Room::MemoryKind::kPinned),
      ended_(api) {}

HostMessages::~HostMessages() { rest(); }

// Waits for the enqueued groups, which still run and refer to this object.
bool HostMessages::rest() noexcept {
  const auto has_failed = [this] {
    const std::lock_guard lock(mutex_);
    return error_ != nullptr;
  };
  if (!has_failed() && await_end()) return true;
  fail(std::make_exception_ptr(Aborted("these messages of a GPU came to their end")));
  abort();  // messages under way end, and no more begin
  return await_end();
}

bool HostMessages::await_end() const noexcept {
  const Deadline deadline = Deadline::after(kLastSeconds);
  int done = 0;
  while (api_.query(ended_.get(), &done) == 0 && !(done != 0 && are_over()) && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return done != 0 && are_over();
}

// Returns whether the carrier neither reads nor writes the memory of groups that failed.
bool HostMessages::are_over() const noexcept {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(left_, [](const auto& each) { return each->done(); });
}

void HostMessages::begin() {
  check();
  posted_ = take_spare();
  posted_->owner = this;
  posted_->sends.clear();
  posted_->receives.clear();
}

std::unique_ptr<HostMessages::HostGroup> HostMessages::take_spare() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return std::make_unique<HostGroup>();
  auto group = std::move(spare_.back());
  spare_.pop_back();
  return group;
}

void HostMessages::send(const std::byte* data, std::size_t bytes, Rank peer,
                        std::span<const Slotted> layout) {
  posted_->sends.push_back(
      {peer, const_cast<std::byte*>(data), bytes, 0, {layout.begin(), layout.end()}, {}, {}});
}

void HostMessages::receive(std::byte* data, std::size_t bytes, Rank peer,
                           std::span<const Slotted> layout) {
  posted_->receives.push_back({peer, data, bytes, 0, {layout.begin(), layout.end()}, {}, {}});
}

// Enqueues the group. Pinned memory is used in stream order: one group's copies come after those of
// the group before.
void HostMessages::end(Stream stream) {
  std::size_t used = 0;
  for (auto* host_messages : {&posted_->sends, &posted_->receives})
    for (HostMessage& each : *host_messages) {
      each.pinned = used;
      used += aligned(each.bytes);
    }
  const CallStream on{stream, capture_of(api_, stream)};
  const bool captured = on.is_captured();
  posted_->captured = captured;
  posted_->pinned = pinned_.take(used, on);
  HostGroup* const group = posted_.get();
  {
    const std::lock_guard lock(mutex_);
    groups_.push_back(std::move(posted_));
  }
  for (const HostMessage& each : group->sends)
    cuda::check(
        api_,
        api_.copy(group->pinned + each.pinned, each.device, each.bytes, CopyKind::kToHost, stream),
        "cudaMemcpyAsync");
  // Copies the receives now: once the group may run, it may also become spare.
  const std::vector<HostMessage> receives = group->receives;
  std::byte* const pinned = group->pinned;
  if (captured)
    cuda::check(api_, api_.call_host(stream, &HostMessages::run, group), "cudaLaunchHostFunc");
  else
    functions_.enqueue(stream, &HostMessages::run, group);
  for (const HostMessage& each : receives)
    cuda::check(
        api_, api_.copy(each.device, pinned + each.pinned, each.bytes, CopyKind::kToDevice, stream),
        "cudaMemcpyAsync");
  if (!captured) cuda::check(api_, api_.record(ended_.get(), stream), "cudaEventRecord");
}

void HostMessages::check() {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void HostMessages::abort() noexcept {
  carrier_.abort("rank " + std::to_string(carrier_.identity().rank) +
                 " aborted its GPU's messages");
  is_aborted_ = true;
}

// ---- On CUDA's thread --------------------------------------------------------------------------

void HostMessages::run(void* argument) {
  auto* const group = static_cast<HostGroup*>(argument);
  HostMessages& self = *group->owner;
  try {
    self.check();  // after an error nothing more is sent
    self.exchange(*group);
  } catch (...) {
    self.fail(std::current_exception());
    if (self.has_others_) self.await_abort();
  }
  const std::lock_guard lock(self.mutex_);
  for (auto* works : {&group->sent, &group->received}) {
    self.left_.insert(self.left_.end(), works->begin(), works->end());
    works->clear();
  }
  if (group->captured) return;
  const auto at =
      std::ranges::find_if(self.groups_, [group](const auto& each) { return each.get() == group; });
  self.spare_.push_back(std::move(*at));
  self.groups_.erase(at);
}

void HostMessages::fail(const std::exception_ptr& error) noexcept {
  mark_lost();
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = error;
}

// Waits for abort(), which whoever finds the error calls.
void HostMessages::await_abort() const noexcept {
  const Deadline deadline = Deadline::after(kLastSeconds);
  while (!is_aborted_ && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Sends and receives the sizes of all units first, then the bytes that count: so the receiver knows
// how many bytes come.
void HostMessages::exchange(HostGroup& group) {
  auto &sends = group.sent, &receives = group.received;
  const auto wait = [this](auto& works) {
    for (auto& each : works) carrier_.wait(*each, timeout_);
    works.clear();
  };
  const auto send = [&](std::byte* data, std::size_t bytes, Rank to) {
    if (bytes > 0) sends.push_back(carrier_.send(data, bytes, to, timeout_));
  };
  const auto receive = [&](std::byte* data, std::size_t bytes, Rank from) {
    if (bytes > 0) receives.push_back(carrier_.receive(data, bytes, from, timeout_));
  };
  for (HostMessage& each : group.sends) {
    if (each.layout.empty()) continue;
    pack(group, each);
    send(each.tables.data(), each.tables.size(), each.peer);
  }
  for (HostMessage& each : group.receives) {
    if (each.layout.empty()) continue;
    each.tables.resize(tables_of(each.layout));
    receive(each.tables.data(), each.tables.size(), each.peer);
  }
  wait(receives);
  for (HostMessage& each : group.sends)
    if (each.layout.empty())
      send(group.pinned + each.pinned, each.bytes, each.peer);
    else
      send(each.body.data(), each.body.size(), each.peer);
  for (HostMessage& each : group.receives) {
    if (each.layout.empty()) {
      receive(group.pinned + each.pinned, each.bytes, each.peer);
      continue;
    }
    make_room(group, each);
    receive(each.body.data(), each.body.size(), each.peer);
  }
  wait(receives);
  for (HostMessage& each : group.receives)
    if (!each.layout.empty()) unpack(group, each);
  wait(sends);
}

void HostMessages::pack(HostGroup& group, HostMessage& host_message) const {
  host_message.tables.clear();
  host_message.body.clear();
  each_unit(group.pinned + host_message.pinned, host_message.layout,
            [&](std::uint32_t size, const std::byte* slot, std::size_t slot_bytes) {
              if (size > slot_bytes)
                throw Error("a GPU wrote a payload that does not fit its slot");
              const auto* at = reinterpret_cast<const std::byte*>(&size);
              host_message.tables.insert(host_message.tables.end(), at, at + sizeof size);
              host_message.body.insert(host_message.body.end(), slot, slot + size);
            });
}

// Puts the received sizes into their places, checks them, and resizes the body to fit.
void HostMessages::make_room(HostGroup& group, HostMessage& host_message) const {
  const std::byte* told = host_message.tables.data();
  std::byte* message = group.pinned + host_message.pinned;
  for (const Slotted& each : host_message.layout) {
    std::memcpy(message, told, sizeof(std::uint32_t) * each.units);
    told += sizeof(std::uint32_t) * each.units;
    message += each.bytes();
  }
  std::size_t bytes = 0;
  each_unit(group.pinned + host_message.pinned, host_message.layout,
            [&](std::uint32_t size, const std::byte*, std::size_t slot_bytes) {
              if (size > slot_bytes)
                throw TransportError("rank " + std::to_string(carrier_.identity().rank) +
                                         ": rank " + std::to_string(host_message.peer) +
                                         " sent a payload whose unit has " + std::to_string(size) +
                                         " bytes, more than " + std::to_string(slot_bytes),
                                     host_message.peer);
              bytes += size;
            });
  host_message.body.resize(bytes);
}

void HostMessages::unpack(HostGroup& group, const HostMessage& host_message) const {
  const std::byte* from = host_message.body.data();
  each_unit(group.pinned + host_message.pinned, host_message.layout,
            [&](std::uint32_t size, std::byte* slot, std::size_t) {
              if (size > 0) std::memcpy(slot, from, size);
              from += size;
            });
}

}  // namespace gradwire::cuda
