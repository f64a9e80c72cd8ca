#include "gradwire/cuda/nccl/nccl_comm.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/base/fork.h"
#include "gradwire/base/log.h"
#include "gradwire/base/run_with_timeout.h"

namespace gradwire::cuda {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Polling intervals of a wait. They begin short, since most waits are, and grow.
class Turns {
 public:
  void rest() const {
    constexpr microseconds kBusy{200}, kLongest{1000};
    const auto passed = Deadline::Clock::now() - begun_;
    if (passed < kBusy)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(passed / 8, kLongest));
  }

 private:
  const Deadline::Clock::time_point begun_ = Deadline::Clock::now();
};

// Calls an interrupt every kSeconds.
class Interruptions {
 public:
  explicit Interruptions(const WaitLimit::Interrupt& interrupt) : interrupt_(interrupt) {}
  void look() {
    if (!interrupt_ || !due_.passed()) return;
    interrupt_();
    due_ = Deadline::after(kSeconds);
  }

 private:
  static constexpr double kSeconds = 0.05;
  const WaitLimit::Interrupt& interrupt_;
  Deadline due_ = Deadline::after(kSeconds);
};

// Throws where NCCL_COMM_BLOCKING asks for blocking calls: it overrides what gradwire sets.
void require_not_blocking() {
  const char* given = std::getenv("NCCL_COMM_BLOCKING");
  if (given != nullptr && *given != '\0' && std::string_view(given) != "0")
    throw InvalidArgument(std::string("NCCL_COMM_BLOCKING=") + given +
                          " makes NCCL wait where nothing can end it: unset it, or set "
                          "GRADWIRE_NCCL_BLOCKING=1 too, and read what that risks");
}

nccl::DataType nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return nccl::kFloat64;
    case DType::kFloat16:
      return nccl::kFloat16;
    case DType::kBFloat16:
      return nccl::kBfloat16;
    case DType::kInt8:
      return nccl::kInt8;
    case DType::kInt32:
      return nccl::kInt32;
    case DType::kInt64:
      return nccl::kInt64;
    case DType::kUInt8:
      return nccl::kUint8;
    case DType::kUInt32:
      return nccl::kUint32;
    case DType::kUInt64:
      return nccl::kUint64;
    default:
      return nccl::kFloat32;
  }
}

nccl::RedOp nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAvg:
      return nccl::kAvg;
    case ReduceOp::kProd:
      return nccl::kProd;
    case ReduceOp::kMin:
      return nccl::kMin;
    case ReduceOp::kMax:
      return nccl::kMax;
    default:
      return nccl::kSum;
  }
}

bool is_posted(nccl::Result result) {
  return result == nccl::kSuccess || result == nccl::kInProgress;
}

nccl::Result post_one(const Nccl& nccl, const NcclComm::NcclMessage& m, int /*size*/,
                      nccl::Comm* comm, Stream stream) {
  return m.to == nullptr ? nccl.send(m.from, m.bytes, nccl::kUint8, m.peer, comm, stream)
                         : nccl.recv(m.to, m.bytes, nccl::kUint8, m.peer, comm, stream);
}

// The same of a library that has no ncclAlltoAll, in whose group this is.
nccl::Result post_all_to_all(const Nccl& nccl, const NativeCollective& c, int size,
                             nccl::Comm* comm, Stream stream) {
  const std::size_t bytes = c.count * size_of(c.dtype);
  for (Rank peer = 0; peer < size; ++peer) {
    const std::size_t at = static_cast<std::size_t>(peer) * bytes;
    for (const NcclComm::NcclMessage& each :
         {NcclComm::NcclMessage{c.input + at, nullptr, bytes, peer},
          NcclComm::NcclMessage{nullptr, c.output + at, bytes, peer}}) {
      const nccl::Result result = post_one(nccl, each, size, comm, stream);
      if (!is_posted(result)) return result;
    }
  }
  return nccl::kSuccess;
}

nccl::Result post_one(const Nccl& nccl, const NativeCollective& c, int size, nccl::Comm* comm,
                      Stream stream) {
  const nccl::DataType type = nccl_type(c.dtype);
  const nccl::RedOp op = nccl_op(c.op);
  switch (c.collective) {
    case Collective::kAllReduce:
      return nccl.all_reduce(c.input, c.output, c.count, type, op, comm, stream);
    case Collective::kReduceScatter:
      return nccl.reduce_scatter(c.input, c.output, c.count, type, op, comm, stream);
    case Collective::kAllGather:
      return nccl.all_gather(c.input, c.output, c.count, type, comm, stream);
    case Collective::kAllToAll:
      return nccl.all_to_all == nullptr
                 ? post_all_to_all(nccl, c, size, comm, stream)
                 : nccl.all_to_all(c.input, c.output, c.count, type, comm, stream);
    case Collective::kBroadcast:
      return nccl.broadcast(c.input, c.output, c.count, type, c.root, comm, stream);
    case Collective::kReduce:
      return nccl.reduce(c.input, c.output, c.count, type, op, c.root, comm, stream);
    default:
      return nccl::kInvalidArgument;
  }
}

// Posts messages or collectives as one group. ncclGroupEnd must be called even after an error, and
// returns the error of a call in the group.
template <typename Item>
nccl::Result post_group(const Nccl& nccl, std::span<const Item> group, int size, nccl::Comm* comm,
                        Stream stream) {
  nccl::Result result = nccl.group_start();
  if (result != nccl::kSuccess) return result;
  for (const Item& each : group) {
    result = post_one(nccl, each, size, comm, stream);
    if (!is_posted(result)) break;
  }
  const nccl::Result ended = nccl.group_end();
  return is_posted(result) ? ended : result;
}

std::string ranks_of(std::span<const NcclComm::NcclMessage> messages) {
  std::set<Rank> peers;
  for (const auto& message : messages) peers.insert(message.peer);
  std::string text;
  for (Rank peer : peers) text += (text.empty() ? "" : ", ") + std::to_string(peer);
  return (peers.size() == 1 ? "rank " : "ranks ") + text;
}

}  // namespace

NcclComm::NcclComm(const Nccl& nccl, const nccl::UniqueId& id, const NcclSettings& settings)
    : nccl_(nccl),
      settings_(settings),
      forks_(forks()),
      // The rounds of a call follow each other closely.
      thread_(settings.blocking ? std::make_unique<CallThread>("NCCL", microseconds(100))
                                : nullptr) {
  if (!settings_.blocking) require_not_blocking();
  or_abort([&] { connect(id); });
}

NcclComm::~NcclComm() {
  if (forks() != forks_) return;  // CUDA does not work in a fork
  if (failure_ || shared_->aborted || !disconnect()) abort();
}

// A call that blocks takes as long as the other ranks take, and its communicator is nobody's yet:
// so it holds no lock, and aborts what nobody waits for any more.
void NcclComm::connect(const nccl::UniqueId& id) {
  const auto call = [&nccl = nccl_, shared = shared_, id, size = settings_.size,
                     rank = settings_.rank, blocks = settings_.blocking,
                     use_device = settings_.use_device] {
    if (blocks && use_device) use_device();
    nccl::Config config;
    config.blocking = blocks ? 1 : 0;
    nccl::Comm* comm = nullptr;
    const nccl::Result result = nccl.comm_init_rank_config(&comm, size, id, rank, &config);
    const std::lock_guard lock(shared->calls);
    shared->comm = comm;
    if (!shared->aborted || comm == nullptr) return result;
    nccl.comm_abort(shared->comm.exchange(nullptr));
    return nccl::kInvalidUsage;
  };
  const Waiting waiting{"ncclCommInitRank", {}, settings_.timeout_seconds};
  settle(make_apart(call, waiting, settings_.interrupt), waiting, settings_.interrupt);
}

// Finalizes and destroys the communicator. Returns whether that succeeded. Enqueued work ends
// first, which takes as long as its peers take.
bool NcclComm::disconnect() noexcept {
  try {
    make([&nccl = nccl_](nccl::Comm* comm) { return nccl.comm_finalize(comm); },
         {"what is enqueued", {}, settings_.ending_seconds}, nullptr);
    end_apart(nccl_.comm_destroy, take(), "ncclCommDestroy");
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void NcclComm::begin() {
  require_alive();
  posted_.clear();
}

void NcclComm::add(const NcclMessage& message) {
  if (message.peer < 0 || message.peer >= settings_.size)
    throw InvalidArgument("there is no rank " + std::to_string(message.peer) + " among " +
                          std::to_string(settings_.size));
  if (message.bytes > 0) posted_.push_back(message);
}

void NcclComm::end(Stream stream) {
  require_alive();
  if (!posted_.empty())
    post(std::span<const NcclMessage>(posted_), stream,
         {"a group", posted_, settings_.timeout_seconds});
}

void NcclComm::run_native(std::span<const NativeCollective> collectives, Stream stream) {
  require_alive();
  post(collectives, stream, {"a collective", {}, settings_.timeout_seconds});
}

template <typename Item>
void NcclComm::post(std::span<const Item> group, Stream stream, const Waiting& waiting) {
  or_abort([&] {
    if (thread_ == nullptr)
      return make(
          [&](nccl::Comm* comm) { return post_group(nccl_, group, settings_.size, comm, stream); },
          waiting, settings_.interrupt);
    make(
        [&nccl = nccl_, items = std::vector<Item>(group.begin(), group.end()),
         size = settings_.size, stream](nccl::Comm* comm) {
          return post_group(nccl, std::span<const Item>(items), size, comm, stream);
        },
        waiting, settings_.interrupt);
  });
}

template <typename Call>
void NcclComm::make(Call call, const Waiting& waiting, const WaitLimit::Interrupt& interrupt) {
  require_not_aborted();
  const auto locked = [shared = shared_, call = std::move(call)] {
    const std::lock_guard lock(shared->calls);
    nccl::Comm* const comm = shared->comm;
    return comm == nullptr ? nccl::kInvalidUsage : call(comm);  // it was aborted
  };
  settle(make_apart(locked, waiting, interrupt), waiting, interrupt);
}

// Makes the call on its thread, where there is one, and else here.
template <typename Call>
nccl::Result NcclComm::make_apart(Call call, const Waiting& waiting,
                                  const WaitLimit::Interrupt& interrupt) {
  if (thread_ == nullptr) return call();
  const Turns turns;
  Interruptions interruptions(interrupt);
  const auto result = std::make_shared<nccl::Result>(nccl::kInProgress);
  thread_->begin([result, call = std::move(call)] { *result = call(); });
  while (!thread_->is_over()) {
    require_not_aborted();
    if (waiting.deadline.passed()) fail(nccl::kInProgress, waiting);
    turns.rest();
    interruptions.look();
  }
  return *result;
}

void NcclComm::check() {
  require_alive();
  or_abort([&] {
    const nccl::Result result = state();
    if (result == nccl::kSuccess || result == nccl::kInProgress) return;
    require_not_aborted();
    fail(result, {"what is enqueued", {}, 0});
  });
}

// Does not wait for a call under way, which may block: it answers for it.
nccl::Result NcclComm::state() {
  const std::unique_lock lock(shared_->calls, std::try_to_lock);
  require_not_aborted();
  if (!lock) return nccl::kInProgress;
  nccl::Result found = nccl::kSuccess;
  const nccl::Result asked = nccl_.comm_get_async_error(shared_->comm, &found);
  return asked == nccl::kSuccess ? found : asked;
}

// Asks NCCL for its state at least once: that joins what NCCL has begun, and some versions report
// success too early.
void NcclComm::settle(nccl::Result result, const Waiting& waiting,
                      const WaitLimit::Interrupt& interrupt) {
  const Turns turns;
  Interruptions interruptions(interrupt);
  if (result == nccl::kSuccess) result = state();
  while (result == nccl::kInProgress) {
    if (waiting.deadline.passed()) fail(result, waiting);
    turns.rest();
    interruptions.look();
    result = state();
  }
  if (result == nccl::kSuccess) return;
  require_not_aborted();
  fail(result, waiting);
}

void NcclComm::fail(nccl::Result result, const Waiting& waiting) const {
  const char* last = nccl_.get_last_error(nullptr);
  std::ostringstream text;
  text << "rank " << settings_.rank << ": NCCL "
       << (result == nccl::kInProgress ? "timed out in " : "failed in ") << waiting.what;
  if (!waiting.messages.empty()) text << " with " << ranks_of(waiting.messages);
  if (result == nccl::kInProgress)
    text << ", after " << waiting.seconds << " s: a rank is late, gone, or out of reach";
  else
    text << ": " << nccl_.get_error_string(result) << " (" << result << ")";
  if (last != nullptr && *last != '\0') text << "; its last error: " << last;
  text << "; NCCL_DEBUG=INFO tells more";
  const Rank peer = only_peer(waiting.messages);
  if (result == nccl::kInProgress) throw Timeout(text.str(), peer);
  throw TransportError(text.str(), result == nccl::kRemoteError ? peer : kNoPeer);
}

// Returns the one peer that can be the cause; kNoPeer if it may be any of several.
Rank NcclComm::only_peer(std::span<const NcclMessage> messages) const noexcept {
  if (settings_.size == 2) return 1 - settings_.rank;
  if (messages.empty()) return kNoPeer;
  const Rank first = messages.front().peer;
  const bool only = std::all_of(messages.begin(), messages.end(),
                                [&](const NcclMessage& m) { return m.peer == first; });
  return only && first != settings_.rank ? first : kNoPeer;
}

template <typename Call>
void NcclComm::or_abort(Call call) {
  try {
    call();
  } catch (const Error&) {
    failure_ = std::current_exception();
    abort();
    throw;
  } catch (...) {  // the interrupt's exception, which is not kept: it belongs to this caller
    abort();
    throw;
  }
}

void NcclComm::require_alive() const {
  if (failure_) std::rethrow_exception(failure_);
  require_not_aborted();
}

void NcclComm::require_not_aborted() const {
  if (shared_->aborted) throw Aborted(who() + "its NCCL communicator was aborted");
}

void NcclComm::abort() noexcept {
  mark_lost();
  shared_->aborted = true;
  if (forks() != forks_) return;
  const std::lock_guard lock(aborts_);
  if (nccl::Comm* comm = take(); comm != nullptr)
    end_apart(nccl_.comm_abort, comm, "ncclCommAbort");
}

// Returns the communicator to the first thread that ends it, null to all others. A thread inside an
// NCCL call leaves it soon, unless it blocks; if not, only the abort makes it leave.
nccl::Comm* NcclComm::take() noexcept {
  constexpr double kCallSeconds = 1;
  const Deadline deadline = Deadline::after(kCallSeconds);
  while (!shared_->calls.try_lock()) {
    if (deadline.passed()) return shared_->comm.exchange(nullptr);
    std::this_thread::sleep_for(milliseconds(1));
  }
  const std::lock_guard lock(shared_->calls, std::adopt_lock);
  return shared_->comm.exchange(nullptr);
}

// Calls `finish` on a thread of its own: it changes the thread's device, and waits for graphs that
// hold messages.
void NcclComm::end_apart(nccl::Result (*finish)(nccl::Comm*), nccl::Comm* comm,
                         const char* name) noexcept {
  try {
    const bool ended = run_with_timeout(settings_.ending_seconds,
                                        [finish, comm, use_device = settings_.use_device] {
                                          if (use_device) use_device();
                                          finish(comm);
                                        });
    if (!ended) log_to_stderr(who() + name + " takes long, and is left to itself");
  } catch (const std::exception& error) {
    log_to_stderr(error.what());
  }
}

}  // namespace gradwire::cuda
