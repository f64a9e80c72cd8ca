#include "gradwire/exec/progress_thread.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "gradwire/base/spin.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::exec {
namespace {

constexpr int kMostMilliseconds = 1000;  // of one sleep
// After which a task is served between its calls, and again. Ranks that ask where another one is
// wait twice as long for its answer.
constexpr double kServeSeconds = 0.1, kServeAgainSeconds = 0.25;

}  // namespace

void ProgressThread::wake(Task& task) {
  const std::lock_guard life(life_);
  const std::lock_guard lock(mutex_);
  entry_of(task)->wanted = true;
  start();
}

void ProgressThread::serve(Task& task) {
  const std::lock_guard life(life_);
  const std::lock_guard lock(mutex_);
  entry_of(task)->served = true;
  serve_at_ = std::min(serve_at_, Deadline::after(kServeSeconds));
  start();
}

std::shared_ptr<ProgressThread::TaskState> ProgressThread::entry_of(Task& task) {
  const auto at = std::ranges::find(entries_, &task, [](const auto& e) { return e->task; });
  if (at != entries_.end()) return *at;
  entries_.push_back(std::make_shared<TaskState>(&task));
  return entries_.back();
}

void ProgressThread::start() {
  if (!bell_) bell_.emplace();
  if (!thread_.joinable())
    thread_ = std::jthread([this](const std::stop_token& stop) { loop(stop); });
  call_thread();
}

// Has the thread look at its tasks again. Called under the mutex.
void ProgressThread::call_thread() {
  changed_.notify_all();
  if (turning_) bell_->ring();
}

void ProgressThread::leave(Task& task) noexcept {
  std::shared_ptr<TaskState> left;
  {
    std::unique_lock lock(mutex_);
    const auto at = std::ranges::find(entries_, &task, [](const auto& e) { return e->task; });
    if (at == entries_.end()) return;
    left = *at;
    unused_.wait(lock, [&] { return !left->used; });
    std::erase(entries_, left);
  }
  if (left->ending.joinable()) left->ending.join();
  stop_if_unused();
}

// A thread without tasks takes no mutex but its own, so that nobody waits long for life_.
void ProgressThread::stop_if_unused() noexcept {
  const std::lock_guard life(life_);
  std::unique_lock lock(mutex_);
  if (!entries_.empty() || !thread_.joinable()) return;
  thread_.request_stop();
  changed_.notify_all();
  lock.unlock();
  thread_.join();
  bell_.reset();
}

void ProgressThread::loop(const std::stop_token& stop) {
  const codec::FloatEnvironment environment;
  TaskStates driven;
  unsigned idle = 0;
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    serve_due(lock);
    take_wanted(lock, driven);
    if (driven.empty())
      await_work(lock, stop);
    else
      take_turns(lock, driven, idle);
  }
}

// Takes over tasks that have work which nobody drives, until there is none: no bell rings for one
// that is woken meanwhile, before the thread takes turns.
void ProgressThread::take_wanted(std::unique_lock<std::mutex>& lock, TaskStates& driven) {
  const auto next = [this] {
    return std::ranges::find_if(entries_, [](const auto& each) { return each->is_due(); });
  };
  for (auto at = next(); at != entries_.end(); at = next()) {
    const std::shared_ptr<TaskState> entry = *at;
    entry->wanted = false;
    entry->used = true;
    lock.unlock();
    const bool taken = entry->task->take_over();
    lock.lock();
    if (taken)
      driven.push_back(entry);
    else
      give_back(*entry);
  }
}

// Serves all tasks at once but those that are driven: a turn does what serves them.
void ProgressThread::serve_due(std::unique_lock<std::mutex>& lock) {
  if (!serve_at_.passed()) return;
  serve_at_ = Deadline::never();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const std::shared_ptr<TaskState> entry = entries_[i];
    if (entry->used || !std::exchange(entry->served, false)) continue;
    entry->used = true;
    lock.unlock();
    const bool again = entry->task->serve_between_calls();
    lock.lock();
    entry->served = entry->served || again;
    give_back(*entry);
  }
  if (std::ranges::any_of(entries_, [](const auto& each) { return each->served; }))
    serve_at_ = std::min(serve_at_, Deadline::after(kServeAgainSeconds));
}

void ProgressThread::await_work(std::unique_lock<std::mutex>& lock, const std::stop_token& stop) {
  const Deadline next = serve_at_;
  const auto wanted = [&] {
    return stop.stop_requested() || serve_at_ < next ||
           std::ranges::any_of(entries_, [](const auto& each) { return each->is_due(); });
  };
  if (next.is_never())
    changed_.wait(lock, wanted);
  else
    changed_.wait_for(lock, std::chrono::milliseconds(next.milliseconds_left(kMostMilliseconds)),
                      wanted);
}

void ProgressThread::take_turns(std::unique_lock<std::mutex>& lock, TaskStates& driven,
                                unsigned& idle) {
  const Deadline next_service = serve_at_;
  turning_ = true;
  lock.unlock();
  bool moved = false;
  unsigned spins = ~0U;
  for (const auto& each : driven) {
    each->turn = each->task->turn();
    moved = moved || each->turn != Turn::kIdle;
    spins = std::min(spins, each->task->spins());
  }
  idle = moved ? 0 : idle + 1;
  const unsigned now = backoff_.spins(spins);
  if (moved)
    backoff_.moved();
  else if (idle <= now)
    pause_spinning();
  else if (idle <= now + backoff_.yields(spins))
    backoff_.yield();
  else
    sleep(driven, next_service);
  lock.lock();
  turning_ = false;
  for (const auto& each : driven) {
    if (each->turn == Turn::kOver) give_back(*each);
    if (each->turn == Turn::kFailed) end_failed(lock, *each);
  }
  std::erase_if(driven, [](const auto& each) {
    return each->turn == Turn::kOver || each->turn == Turn::kFailed;
  });
}

// Ends a task while the others go on. Where no thread can be made, they wait.
void ProgressThread::end_failed(std::unique_lock<std::mutex>& lock, TaskState& entry) {
  try {
    entry.ending = std::jthread([this, &entry] {
      entry.task->end_failed();
      const std::lock_guard ended(mutex_);
      give_back(entry);
      call_thread();
    });
  } catch (const std::system_error&) {
    lock.unlock();
    entry.task->end_failed();
    lock.lock();
    give_back(entry);
  }
}

// Sleeps until a doorbell rings. Each task has armed its own and looked once more by then.
void ProgressThread::sleep(const TaskStates& driven, const Deadline& until) {
  int most = until.milliseconds_left(kMostMilliseconds);
  doorbells_.assign(1, {bell_->fd(), POLLIN, 0});
  for (const auto& each : driven) most = std::min(most, each->task->before_sleep(doorbells_));
  if (most >= 0) {
    backoff_.sleeps();
    ::poll(doorbells_.data(), doorbells_.size(), most);
  }
  if (doorbells_.front().revents != 0) bell_->clear();
  for (const auto& each : driven) each->task->after_sleep();
}

void ProgressThread::give_back(TaskState& entry) {
  entry.used = false;
  unused_.notify_all();
}

}  // namespace gradwire::exec
