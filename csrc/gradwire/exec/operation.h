// Request: what a caller asks for. Operation: the same, bound to a plan and to addresses.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "gradwire/codec/codec.h"
#include "gradwire/codec/feedback.h"
#include "gradwire/exec/execution.h"
#include "gradwire/exec/feedback_view.h"
#include "gradwire/exec/plan.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::exec {

// How an extent reads as a matrix, row by row.
struct Shape {
  std::size_t rows = 1;
  std::size_t columns = 0;
};

struct Letters;

// A run of elements in the caller's memory; data may be null when count is 0.
struct Array {
  std::byte* data = nullptr;
  std::uint64_t count = 0;  // elements
};

// Which arrays a collective wants, at rank r of p:
//   all_reduce, reduce, broadcast   inputs = outputs in number and counts; equal addresses: in
//   place
//                                   (reduce: outputs only at the root; broadcast: inputs only at
//                                   the root)
//   reduce_scatter                  inputs: p blocks; outputs: one, as long as block r
//   all_gather                      inputs: one; outputs: p blocks, block r as long as the input
//   gather / scatter                p blocks at the root (outputs / inputs), one block everywhere
//   all_to_all                      p blocks in and p blocks out
struct Request {
  Collective collective = Collective::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  std::string_view algorithm = "auto";
  const schedule::Schedule* schedule = nullptr;  // the user's own; then algorithm is ignored
  std::uint64_t schedule_digest = 0;             // of *schedule, taken once by whoever keeps it
  std::shared_ptr<const codec::Codec> codec;     // null: none
  // Lossy codecs: null for no error feedback. The keys lie end to end over all inputs, each of
  // which belongs to one key; of reduce_scatter, whose inputs are blocks, to any number of them.
  std::shared_ptr<codec::ErrorFeedback> feedback;
  std::span<const codec::KeyedExtent> keys;
  // Instead of a codec: payloads are exchanged (exec/exchange.h), and the arrays are not touched.
  std::shared_ptr<Letters> letters;
  std::string_view codec_label;  // what the ranks are told of the codec; empty: its name
  std::span<const Array> inputs;
  std::span<const Array> outputs;
  std::span<const Shape> shapes;  // of the inputs, for codecs of matrices; empty: all are vectors
  double timeout = 300;           // seconds, from when the operation starts to run
};

struct CopyStep {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
};

// Reused from call to call: bind() allocates only when it needs more room than ever before.
class Operation {
 public:
  // The elements of each extent that the request's schedule works on (OpSpec::counts). Blocks of
  // reduce_scatter are cut where keys end, all into as many extents, some of them empty. For
  // gather, scatter and all_to_all only this rank's own counts are known here: the others are 0,
  // and uneven counts are checked frame by frame instead of in the fingerprint.
  static void counts(const Request& request, Rank rank, int size, std::vector<std::uint64_t>& out);
  // Throws InvalidArgument when inputs and outputs do not fit together.
  static void check(const Request& request, Rank rank, int size);

  // `transaction`: open for the request's keys where it feeds back; the caller settles it.
  void bind(const Request& request, std::shared_ptr<const Plan> plan, Rank rank, int size,
            codec::ErrorFeedback::Transaction& transaction);

  // Local work before the first frame and after the last: copies, and what the codec adapts.
  // `finite`: what the execution says; returns whether the residuals may move.
  void begin();
  bool end(bool finite);
  Execution::Call call() const;
  const Plan& plan() const noexcept { return *plan_; }
  const std::shared_ptr<const Plan>& shared_plan() const noexcept { return plan_; }

 private:
  static void copy(const std::vector<CopyStep>& steps);
  void bind_arrays(const Request& request, Rank rank, int size);
  void bind_in_place(const Request& request, Rank rank);
  void bind_fold(const Request& request, Rank rank, int size);
  void deliver_residuals() const;
  void fold() const;
  void bind_reduce_scatter(const Request& request, Rank rank);
  void bind_all_gather(const Request& request, Rank rank);
  void bind_blocks(const Request& request, Rank rank, int size);
  void bind_all_to_all(const Request& request, Rank rank, int size);
  void add_copy(std::vector<CopyStep>& steps, std::byte* to, const Array& from);
  std::byte* scratch(std::span<const Array> arrays);
  std::byte* scratch(std::size_t bytes);
  bool all_finite() const;
  float* floats(std::size_t extent) const { return reinterpret_cast<float*>(extents_[extent]); }

  std::shared_ptr<const Plan> plan_;
  std::size_t element_ = 0;  // bytes
  std::vector<std::byte*> extents_;
  // Of a plan that folds: what this rank adds, one after the other in its block, and the sums.
  std::vector<std::byte*> addends_;
  std::vector<Array> sums_;
  std::vector<CopyStep> before_, after_;
  std::vector<std::byte> scratch_;
  FeedbackView feedback_;
};

}  // namespace gradwire::exec
