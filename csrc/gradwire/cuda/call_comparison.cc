#include "gradwire/cuda/call_comparison.h"

#include <algorithm>
#include <utility>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"

namespace gradwire::cuda {

CallComparison::CallComparison(exec::Communicator& shadow)
    : shadow_(shadow),
      words_(std::make_unique<Words>()),
      nothing_(static_cast<std::size_t>(shadow.identity().size)) {}

// A round that is not over still writes its words.
CallComparison::~CallComparison() {
  if (round_ && !round_->done()) [[maybe_unused]]
    const Words* const kept = words_.release();
}

void CallComparison::add(std::string text, double timeout, bool asks_to_stop, bool asks_to_resize) {
  const std::uint64_t before = digest_up_to(made_);
  ++made_;
  if (asks_to_stop) own_.stop = std::min(own_.stop, made_);
  if (asks_to_resize) own_.resize = std::min(own_.resize, made_);
  if (shadow_.identity().size == 1) {  // alike by itself
    counted_ = compared_ = made_;
    agreed_ = own_;
    return;
  }
  const std::uint64_t digest = Fnv1a().number(before).text(text).digest();
  calls_.push_back({std::move(text), digest, timeout});
}

const CallComparison::ComparedCall& CallComparison::call(std::uint64_t number) const {
  return calls_[static_cast<std::size_t>(number - compared_ - 1)];
}

// The one for which the others are waited for.
const CallComparison::ComparedCall& CallComparison::oldest() const {
  return call(counted_ < made_ ? counted_ + 1 : made_);
}

std::uint64_t CallComparison::digest_up_to(std::uint64_t number) const {
  return number == compared_ ? compared_digest_ : call(number).digest;
}

void CallComparison::advance(bool at_once, Clock::time_point now) {
  if (round_) {
    if (!round_->done()) return;
    end_round();
  }
  if (!one_by_one_.empty()) return check_one_by_one();
  if (is_over() || (!at_once && !has_many_calls() && now < due_)) return;
  begin_round(now);
}

// All ranks know what the last round has counted, so if some of it is not compared yet, all take
// part in this one; otherwise each of them does as soon as it has made a call.
void CallComparison::begin_round(Clock::time_point now) {
  const std::uint64_t digest = digest_up_to(counted_);
  *words_ = {made_, digest, ~digest, own_};
  const exec::Array words{reinterpret_cast<std::byte*>(words_.get()),
                          sizeof *words_ / sizeof made_};
  exec::Request request;
  request.dtype = DType::kUInt64;
  request.op = ReduceOp::kMin;
  request.algorithm = "recursive_doubling";
  request.codec_label = "a comparison of calls on GPUs";
  request.inputs = request.outputs = {&words, 1};
  request.timeout = oldest().timeout;
  due_ = now + kInterval;
  round_ = submit(request);
}

void CallComparison::end_round() {
  const auto round = std::exchange(round_, nullptr);
  try {
    round->rethrow();
  } catch (const Timeout& error) {
    throw Timeout(oldest().text + " timed out: " + error.what(), error.peer(), error.job_peer(),
                  error.only_this_communicator());
  }
  if (words_->digest != ~words_->complement) return begin_one_by_one();
  while (compared_ < counted_) {
    compared_digest_ = calls_.front().digest;
    calls_.pop_front();
    ++compared_;
  }
  counted_ = words_->made;
  agreed_.stop = std::min(agreed_.stop, words_->requests.stop);
  agreed_.resize = std::min(agreed_.resize, words_->requests.resize);
}

// All ranks begin this, as they all have seen that digests of the calls up to counted_ differ.
void CallComparison::begin_one_by_one() {
  for (std::uint64_t number = compared_ + 1; number <= counted_; ++number)
    one_by_one_.push_back(compare(call(number)));
}

void CallComparison::check_one_by_one() const {
  for (const auto& each : one_by_one_) {
    if (!each->done()) return;
    each->rethrow();
  }
  throw InvalidArgument("ranks made different calls on their GPUs, among these: " +
                        call(compared_ + 1).text);
}

// A collective of zero bytes with the call's text.
std::shared_ptr<Work> CallComparison::compare(const ComparedCall& call) {
  exec::Request request;
  request.collective = Collective::kAllGather;
  request.dtype = DType::kUInt8;
  request.algorithm = "direct";
  request.codec_label = call.text;
  request.inputs = {nothing_.data(), 1};
  request.outputs = nothing_;
  request.timeout = call.timeout;
  return submit(request);
}

std::shared_ptr<Work> CallComparison::submit(const exec::Request& request) {
  auto work = shadow_.submit(request);
  work->set_awaited();  // the GPU waits
  return work;
}

}  // namespace gradwire::cuda
