#include "gradwire/exec/call_queue.h"

#include "gradwire/base/wire.h"

namespace gradwire::exec {

void Pending::roll_back() noexcept {
  transaction.settle(false);
  if (program != nullptr) program->roll_back();
}

std::unique_ptr<Pending> CallQueue::take_spare() {
  if (spare_.empty()) return std::make_unique<Pending>();
  auto pending = std::move(spare_.back());
  spare_.pop_back();
  if (pending->work.use_count() > 1)
    pending->work = std::make_shared<Work>();
  else
    pending->work->reuse();
  return pending;
}

std::shared_ptr<Work> CallQueue::push(std::unique_ptr<Pending> pending) {
  std::shared_ptr<Work> work = pending->work;
  queue_.push_back(std::move(pending));
  front_ = queue_.front().get();
  return work;
}

void CallQueue::pop(std::uint16_t requests) {
  auto done = std::move(queue_.front());
  queue_.erase(queue_.begin());
  front_ = queue_.empty() ? nullptr : queue_.front().get();
  ++over_;
  if ((requests & kFrameStop) != 0 && !stop_since) stop_since = over_;
  if ((requests & kFrameResize) != 0 && !resize_since) resize_since = over_;
  done->feedback.reset();
  done->work->finish(nullptr);
  spare_.push_back(std::move(done));
}

void CallQueue::fail(const std::exception_ptr& error) noexcept {
  for (auto& each : queue_) {
    each->roll_back();
    each->work->finish(error);
  }
  queue_.clear();
  front_ = nullptr;
  for (auto& [transfer, sends] : transfers) transfer.work->finish(error);
  transfers.clear();
}

}  // namespace gradwire::exec
