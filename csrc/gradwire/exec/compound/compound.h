// Compound: a collective that is made of others. Between them there is local work; each of them is
// a call of its own to schedules, histories and timeouts' texts. The driver keeps compounds and
// binds them again, so that a repeated call allocates nothing.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gradwire/codec/feedback.h"
#include "gradwire/exec/execution/operation.h"
#include "gradwire/exec/execution/traffic.h"

namespace gradwire::exec {

// What a compound is told when its next phase is wanted.
struct Progress {
  std::uint32_t operation = 0;  // the number that the next phase will have
  bool finite = true;           // the results of the phase before
};

class Compound {
 public:
  virtual ~Compound() = default;

  // On the caller's thread, when the request is submitted: takes what it needs of it, and opens the
  // transaction. Throws InvalidArgument, and is as before, for what makes no valid call.
  void bind(const Request& request, Rank rank, int size);

  // After that, on the same thread, before the request is queued: local work for which nobody is
  // needed, so that it is done while earlier calls travel.
  virtual void prepare() {}

  // A request as its phases will be, whose plan shows at submission that they can be made.
  virtual const Request& probe() = 0;

  // By the driver: the next phase, which stays valid until the call after; null when all is done
  // and settled.
  virtual const Request* next(const Progress& progress) = 0;

  // The call has failed: lets go of the residuals as they were.
  virtual void roll_back() noexcept { transaction_.settle(false); }

  // In codecs so far; whoever counts it takes it.
  CodecTime& codec_time() noexcept { return spent_; }

  // Of this rank's residuals, for phases that feed back.
  codec::ErrorFeedback::Transaction& transaction() noexcept { return transaction_; }

 protected:
  // The request as it was bound: its spans and strings are copies.
  const Request& whole() const noexcept { return whole_; }
  // Elements of each of its extents (extent_counts).
  const std::vector<std::uint64_t>& counts() const noexcept { return counts_; }
  Rank rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  // A phase on this rank's behalf: algorithm "auto", and what the ranks are told of the codec.
  Request phase(Collective collective, DType dtype, ReduceOp op) const;

  // For ranks that hold different results, or none, and must all the same agree whether residuals
  // may move: a phase in which each says whether its own are finite.
  // After it settle_agreed() settles alike on all ranks.
  const Request* ask_all(bool finite);
  void settle_agreed();
  // The end of a call with NaN or Inf in it: every result is NaN, and no residual moves.
  void refuse_results();

  CodecTime spent_;

 private:
  void take_label(const Request& request);
  // The rest of bind(), when the copy is made and the transaction is open.
  virtual void begin() = 0;

  Request whole_;
  Rank rank_ = 0;
  int size_ = 1;
  std::string algorithm_, label_;
  std::shared_ptr<const codec::Codec> labelled_;  // what label_ was made for
  std::uint64_t labelled_digest_ = 0;
  std::vector<std::uint64_t> counts_;
  std::vector<Array> inputs_, outputs_;
  std::vector<Shape> shapes_;
  std::vector<codec::KeyedExtent> keys_;
  Request question_;
  std::byte finite_{};  // 1: this rank's results are; then those of all
  Array answer_{&finite_, 1};
  codec::ErrorFeedback::Transaction transaction_;
};

// How a request is carried out.
enum class Way : std::uint8_t {
  kAtOnce,    // one collective
  kAgreed,    // one, then the ranks agree whether all their results are finite
  kGather,    // payloads, encoded once, are gathered and added
  kLowRank,   // two all_reduces of factors
  kExchange,  // payloads are gathered; the caller encodes and decodes
};
inline constexpr std::size_t kWays = 5;

Way way_of(const Request& request, int size);
std::unique_ptr<Compound> make_compound(Way way);  // not for kAtOnce

}  // namespace gradwire::exec
