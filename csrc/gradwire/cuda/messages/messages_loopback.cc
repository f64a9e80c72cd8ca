#include "gradwire/cuda/messages/messages_loopback.h"

#include <chrono>
#include <utility>

#include "gradwire/base/deadline.h"
#include "gradwire/base/error.h"

namespace gradwire::cuda {
namespace {

constexpr std::chrono::milliseconds kInterruptInterval{100};  // between two looks for Ctrl-C

}  // namespace

class Loopback::Endpoint final : public Messages {
 public:
  Endpoint(Loopback& shared, Rank rank, double timeout, Interrupt interrupt)
      : shared_(shared), rank_(rank), timeout_(timeout), interrupt_(std::move(interrupt)) {}

  std::string_view name() const noexcept override { return "loopback"; }

  void begin() override {
    sends_.clear();
    receives_.clear();
  }
  void send(const std::byte* data, std::size_t bytes, Rank peer,
            std::span<const Slotted>) override {
    sends_.push_back({{data, bytes}, peer, 0});
  }
  void receive(std::byte* data, std::size_t bytes, Rank peer, std::span<const Slotted>) override {
    receives_.push_back({data, bytes, peer});
  }
  void end(Stream stream) override;

  void check() override {
    const std::lock_guard lock(shared_.mutex_);
    require_alive();
  }
  void abort() noexcept override {
    mark_lost();
    shared_.abort("rank " + std::to_string(rank_) + " aborted its GPU's messages");
  }

 private:
  struct Sent {
    PostedSend posted_send;
    Rank to;
    std::uint64_t number;  // of the pair's messages
  };
  struct Received {
    std::byte* data;
    std::size_t bytes;
    Rank from;
  };

  void require_alive() const {
    if (shared_.aborted_) throw Aborted(shared_.reason_);
  }
  // Waits until ready() holds, which `peer` has to bring about.
  template <typename Ready>
  void await(std::unique_lock<std::mutex>& lock, Rank peer, Ready ready) {
    const Deadline deadline = Deadline::after(timeout_);
    while (!ready()) {
      require_alive();
      if (deadline.passed())
        throw Timeout("rank " + std::to_string(rank_) + " timed out: it waited " +
                          std::to_string(timeout_) + " s for rank " + std::to_string(peer) +
                          " to make the same call",
                      peer);
      if (shared_.changed_.wait_for(lock, kInterruptInterval) == std::cv_status::no_timeout ||
          !interrupt_)
        continue;
      lock.unlock();
      interrupt_();
      lock.lock();
    }
  }
  void post();
  void take(std::unique_lock<std::mutex>& lock, const Received& each, Stream stream);

  Loopback& shared_;
  const Rank rank_;
  const double timeout_;
  const Interrupt interrupt_;
  std::vector<Sent> sends_;
  std::vector<Received> receives_;
};

// A receive is a copy on the receiver's stream, after the sender's `ready` event. The sender's
// stream then waits for the pair's `taken` event, since its next work may overwrite the data.
void Loopback::Endpoint::end(Stream stream) {
  const Api& api = shared_.api_;
  std::unique_lock lock(shared_.mutex_);
  require_alive();
  const Event ready = shared_.ready_[static_cast<std::size_t>(rank_)]->get();
  if (!sends_.empty()) cuda::check(api, api.record(ready, stream), "cudaEventRecord");
  post();
  for (const Received& each : receives_) take(lock, each, stream);
  for (const Received& each : receives_)
    shared_.pair(each.from, rank_).taken += 1;  // one event after all copies is enough
  for (const Received& each : receives_)
    cuda::check(api, api.record(shared_.pair(each.from, rank_).taken_event->get(), stream),
                "cudaEventRecord");
  shared_.changed_.notify_all();
  for (const Sent& each : sends_) {
    const RankPair& pair = shared_.pair(rank_, each.to);
    await(lock, each.to, [&] { return pair.taken >= each.number; });
    cuda::check(api, api.wait(stream, pair.taken_event->get()), "cudaStreamWaitEvent");
  }
}

void Loopback::Endpoint::post() {
  for (Sent& each : sends_) {
    RankPair& pair = shared_.pair(rank_, each.to);
    pair.posted.push_back(each.posted_send);
    each.number = pair.taken + pair.posted.size();
  }
  shared_.changed_.notify_all();
}

void Loopback::Endpoint::take(std::unique_lock<std::mutex>& lock, const Received& each,
                              Stream stream) {
  const Api& api = shared_.api_;
  RankPair& pair = shared_.pair(each.from, rank_);
  await(lock, each.from, [&] { return !pair.posted.empty(); });
  const PostedSend posted_send = pair.posted.front();
  pair.posted.pop_front();
  if (posted_send.bytes != each.bytes)
    throw TransportError("rank " + std::to_string(each.from) + " sent " +
                             std::to_string(posted_send.bytes) + " bytes where rank " +
                             std::to_string(rank_) + " expects " + std::to_string(each.bytes),
                         each.from);
  const Event ready = shared_.ready_[static_cast<std::size_t>(each.from)]->get();
  cuda::check(api, api.wait(stream, ready), "cudaStreamWaitEvent");
  cuda::check(api,
              api.copy(each.data, posted_send.data, posted_send.bytes, CopyKind::kOnDevice, stream),
              "cudaMemcpyAsync");
}

Loopback::Loopback(const Api& api, int size) : api_(api), size_(size) {
  pairs_.resize(static_cast<std::size_t>(size) * static_cast<std::size_t>(size));
  ready_.resize(static_cast<std::size_t>(size));
}

Loopback::RankPair& Loopback::pair(Rank from, Rank to) {
  return pairs_[static_cast<std::size_t>(from) * static_cast<std::size_t>(size_) +
                static_cast<std::size_t>(to)];
}

std::unique_ptr<Messages> Loopback::endpoint(Rank rank, double timeout, Interrupt interrupt) {
  const std::lock_guard lock(mutex_);
  ready_[static_cast<std::size_t>(rank)] = std::make_unique<OwnedEvent>(api_);
  for (Rank from = 0; from < size_; ++from)
    pair(from, rank).taken_event = std::make_unique<OwnedEvent>(api_);
  return std::make_unique<Endpoint>(*this, rank, timeout, std::move(interrupt));
}

void Loopback::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (!aborted_) reason_ = reason;
  aborted_ = true;
  changed_.notify_all();
}

}  // namespace gradwire::cuda
