// CpuDevice: the steps of one call on a CPU. The driver runs its phases one after the other, and
// binds the object again for later calls, so that a repeated call allocates nothing. A call that is
// one plan and needs no vote is an Operation and has no CpuDevice.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gradwire/codec/feedback/feedback.h"
#include "gradwire/exec/execution/feedback_view.h"
#include "gradwire/exec/execution/traffic.h"
#include "gradwire/exec/program/payloads.h"
#include "gradwire/exec/program/program.h"

namespace gradwire::exec {

// The payload of a codec written in Python, which encodes before the call and decodes after it, on
// the caller's threads; and, when the Work is over, every rank's. The caller keeps it alive.
struct ExchangePayloads {
  std::vector<std::byte> own;
  bool finite = true;             // whether the values that `own` encodes are
  std::size_t limit = 0;          // bytes of any rank's payload
  std::vector<std::byte> all;     // the payloads of all ranks, end to end
  std::vector<std::size_t> ends;  // by rank: the end of its payload in `all`
  bool all_finite = true;

  // The call's keys, if it feeds back. Whoever decodes ends the transaction, or the call's failure.
  std::shared_ptr<codec::ErrorFeedback> feedback;
  codec::ErrorFeedback::Transaction transaction;
};

// The state of the call when its next phase begins.
struct Progress {
  std::uint32_t operation = 0;  // the number that the next phase will have
  bool finite = true;           // whether the results of the last phase are
};

class CpuDevice final : public Device {
 public:
  // Copies what it needs of the request, and opens the transaction; called on the caller's thread
  // when the request is submitted. Throws InvalidArgument for an invalid call, and then changes
  // nothing.
  void bind(const Request& request, const Decision& decision);

  // Does local work that needs no other rank, so that it is done while earlier calls run. Called
  // after bind(), on the same thread, before the request is queued.
  void prepare();

  // Returns a request like its phases. Making its plan shows at submission that they are possible.
  const Request& probe();

  // Returns the next phase, valid until next() is called again; null when all is done.
  // Called on the driver's thread.
  const Request* next(const Progress& progress);

  // Ends a failed call: residuals stay as they were.
  void roll_back() noexcept {
    (original_.payloads ? original_.payloads->transaction : transaction_).settle(false);
  }

  // Returns the time spent in codecs since it was last set to zero, which the caller may do.
  CodecTime& codec_time() noexcept { return spent_; }

  // Returns this rank's residuals, for phases that feed back.
  codec::ErrorFeedback::Transaction& transaction() noexcept { return transaction_; }

 private:
  const Request* run_plan() override { return &original_; }
  const Request* exchange_lengths() override;
  const Request* exchange_payloads() override { return &payloads_.bytes(limit_); }
  const Request* vote() override;
  void deliver(std::span<const SummedArray> arrays) override;
  void mark(std::span<const SummedArray> arrays) override;
  void average(std::span<const SummedArray> arrays) override;
  void encode(std::span<const SummedArray> arrays) override;
  void add_up(std::span<const SummedArray> arrays) override;
  FactorRoom take_factor_room(std::size_t left, std::size_t right) override;
  void make_left(std::span<const Matrix> matrices) override;
  bool make_right(std::span<const Matrix> matrices) override;
  void multiply(std::span<const Matrix> matrices) override;
  void finish() override;

  void keep(const Request& request, const Decision& decision);
  std::string_view take_label(const Request& request);
  void begin_payloads();
  void return_payloads();

  void take_payload(Rank from, std::size_t array);
  void sum(const SummedArray& array);
  void check_ends() const;
  Rank sender_of_invalid_payload(std::size_t count) const;
  [[noreturn]] void refuse(Rank from, const std::string& why) const;

  const float* input_with_narrow(const SummedArray& array) const;
  const float* values(const Matrix& matrix) const;
  std::span<const float> last_right(const Matrix& matrix) const;
  void multiply_by_rows(codec::LowRankResult result, const Matrix& matrix);
  void remember(const Matrix& matrix);

  // The request as it was bound, and what its spans and strings are copied to.
  Request original_;
  std::string algorithm_, codec_label_, label_;
  std::shared_ptr<const codec::Codec> labelled_;  // what label_ was made for
  std::uint64_t labelled_digest_ = 0;
  std::vector<Array> inputs_, outputs_;
  std::vector<Shape> shapes_;
  std::vector<codec::KeyedArray> keys_;

  Program program_;
  codec::ErrorFeedback::Transaction transaction_;
  FeedbackView feedback_;
  CodecTime spent_;
  std::uint32_t operation_ = 0;
  bool finite_ = true;  // whether the results are, as far as is known
  struct {
    bool taken = false;
    Request request;
    std::byte all_finite{};
    Array array{&all_finite, 1};
  } vote_;

  Payloads payloads_;
  std::size_t used_ = 0, limit_ = 0;  // bytes of this rank's payload, and of any rank's at most
  std::vector<std::size_t> starts_;   // by rank: where the payload of the next array begins
  std::vector<ConstBytes> array_payloads_;  // by rank: the payload of one array

  struct {
    std::vector<float> left, right, own_right;
    std::vector<double> room;
    std::vector<float> rows_of_left, error;  // of a few rows, where residuals are narrow
  } factors_;
};

}  // namespace gradwire::exec
