// CompoundCollective: a collective that is made of others, its phases, with local work between
// them. For schedules, histories and the texts of timeouts each phase is a call of its own. The
// driver keeps these objects and binds them again, so that a repeated call allocates nothing.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gradwire/codec/feedback/feedback.h"
#include "gradwire/exec/execution/operation.h"
#include "gradwire/exec/execution/traffic.h"

namespace gradwire::exec {

// The state of the call when its next phase begins.
struct Progress {
  std::uint32_t operation = 0;  // the number that the next phase will have
  bool finite = true;           // whether the results of the last phase are
};

class CompoundCollective {
 public:
  virtual ~CompoundCollective() = default;

  // Copies what it needs of the request, and opens the transaction; called on the caller's thread
  // when the request is submitted. Throws InvalidArgument for an invalid call, and then changes
  // nothing.
  void bind(const Request& request, Rank rank, int size);

  // Does local work that needs no other rank, so that it is done while earlier calls run. Called
  // after bind(), on the same thread, before the request is queued.
  virtual void prepare() {}

  // Returns a request like its phases. Making its plan shows at submission that they are possible.
  virtual const Request& probe() = 0;

  // Returns the next phase, valid until next() is called again; null when all is done and settled.
  // Called on the driver's thread.
  virtual const Request* next(const Progress& progress) = 0;

  // Ends a failed call: residuals stay as they were.
  virtual void roll_back() noexcept { transaction_.settle(false); }

  // Returns the time spent in codecs that is not counted yet. Whoever counts it sets it to zero.
  CodecTime& codec_time() noexcept { return spent_; }

  // Returns this rank's residuals, for phases that feed back.
  codec::ErrorFeedback::Transaction& transaction() noexcept { return transaction_; }

 protected:
  // Returns the request as it was bound, with its spans and strings copied.
  const Request& original() const noexcept { return original_; }
  // Returns the elements of each of its extents (extent_counts).
  const std::vector<std::uint64_t>& counts() const noexcept { return counts_; }
  Rank rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  // Returns a request for a phase: algorithm "auto", and the label that ranks compare.
  Request phase(Collective collective, DType dtype, ReduceOp op) const;

  // Returns a phase that tells all ranks whether every rank's results are finite: ranks that hold
  // different results, or none, must still agree whether residuals may move. After that phase
  // settle_vote() settles alike on all ranks.
  const Request* vote_finite(bool finite);
  void settle_vote();
  // Ends a call that has NaN or Inf in it: every result becomes NaN, and no residual moves.
  void fill_with_nan();

  CodecTime spent_;

 private:
  void take_label(const Request& request);
  // Does the rest of bind(), when the copy is made and the transaction is open.
  virtual void begin() = 0;

  Request original_;
  Rank rank_ = 0;
  int size_ = 1;
  std::string algorithm_, codec_label_, label_;
  std::shared_ptr<const codec::Codec> labelled_;  // what label_ was made for
  std::uint64_t labelled_digest_ = 0;
  std::vector<std::uint64_t> counts_;
  std::vector<Array> inputs_, outputs_;
  std::vector<Shape> shapes_;
  std::vector<codec::KeyedExtent> keys_;
  Request vote_;
  std::byte finite_{};  // 1: this rank's results are finite; after the vote: all ranks' are
  Array vote_array_{&finite_, 1};
  codec::ErrorFeedback::Transaction transaction_;
};

// How a request is executed.
enum class ExecutionPath : std::uint8_t {
  kSingle,    // one collective
  kAgreed,    // one collective, then ranks vote if all results are finite
  kGather,    // payloads, encoded once, are gathered and added
  kLowRank,   // two all_reduces of factors
  kExchange,  // payloads are gathered; the caller encodes and decodes
};
inline constexpr std::size_t kPaths = 5;

ExecutionPath path_of(const Request& request, int size);
std::unique_ptr<CompoundCollective> make_compound(ExecutionPath path);  // not for kSingle

}  // namespace gradwire::exec
