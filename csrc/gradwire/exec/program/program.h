// Program: a call as a list of steps, one list for CPUs and GPUs. A Device does what is local: at
// once on a CPU (cpu_device.h), in stream order on a GPU (cuda/gpu_device.h). What needs other
// ranks is a *phase*, a request of its own that runs by a plan: in a CPU's poll loop, or on the
// call's stream. For schedules, histories and the texts of timeouts each phase is a call.
//
//   plan      run the plan
//   native    deliver · run the native collectives
//   gather    encode · exchange lengths · exchange payloads · add them up
//             (one rank: deliver)
//   lowrank   make left factors · sum them · make right factors · sum them · multiply
//   exchange  exchange lengths · exchange payloads
//   each      [vote] · finish
//
// Ranks vote where they feed back and hold different results, or none: they must still agree
// whether residuals may move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "gradwire/codec/factors.h"
#include "gradwire/exec/execution/feedback_view.h"
#include "gradwire/exec/plan/method.h"

namespace gradwire::exec {

// An array of float32, which belongs to one key if there are keys: an input, and where its sum
// goes.
struct SummedArray {
  std::size_t index = 0;  // in array_counts()
  const float* x = nullptr;
  float* y = nullptr;  // may be x; null where other ranks keep the sum
  std::uint64_t count = 0;
};

// An array that is factored. The factors of all matrices lie end to end, each kind for itself.
struct Matrix {
  SummedArray array;
  codec::Factors of;
  float* left = nullptr;
  float* right = nullptr;      // what the left one begins with; then the sum of right factors
  float* own_right = nullptr;  // this rank's addend of that
  KeyOffset in_memory;         // with feedback: where the sum is remembered

  std::size_t left_size() const { return of.rows * of.rank; }
  std::size_t right_size() const { return of.columns * of.rank; }
};

// The local work of one call, and its phases.
class Device {
 public:
  virtual ~Device() = default;

  // Return the request to run as a phase; null if there is none, or the device has run it.
  virtual const Request* run_plan() = 0;
  virtual const Request* exchange_lengths() = 0;
  virtual const Request* exchange_payloads() = 0;
  virtual const Request* vote() = 0;
  virtual void run_native() {}

  // y := x + e, e' := 0: for what loses nothing. Without feedback y := x.
  virtual void deliver(std::span<const SummedArray> arrays) = 0;
  // Finds out whether y is finite; units of a codec that are not become NaN.
  virtual void mark(std::span<const SummedArray> arrays) = 0;
  virtual void average(std::span<const SummedArray> arrays) = 0;

  // Payloads: encode() adapts the codec, too; add_up() marks and averages where y is not null.
  virtual void encode(std::span<const SummedArray> arrays) = 0;
  virtual void add_up(std::span<const SummedArray> arrays) = 0;

  // Factors. Room for all left ones, all right ones, and all of this rank's right ones.
  struct FactorRoom {
    float *left = nullptr, *right = nullptr, *own_right = nullptr;
  };
  virtual FactorRoom take_factor_room(std::size_t left, std::size_t right) = 0;
  virtual void make_left(std::span<const Matrix> matrices) = 0;
  // Returns false where the results are known not to be finite, alike on all ranks.
  virtual bool make_right(std::span<const Matrix> matrices) = 0;
  // y := the product of the sums, averaged. Keeps this rank's error, and the right factors.
  virtual void multiply(std::span<const Matrix> matrices) = 0;

  // Ends the call: residuals change if all results are finite.
  virtual void finish() = 0;
};

// Returns whether the ranks of a call that feeds back must vote.
inline bool votes(const Request& request, bool feeds_back) {
  return feeds_back && request.collective != Collective::kAllReduce;
}

// Reused from call to call: bind() allocates only when it needs more room than ever before.
class Program {
 public:
  // `request` must stay until the last step.
  void bind(const Request& request, const Decision& decision, bool feeds_back, Device& device);
  // Does the steps at the beginning that need neither other ranks nor the call's number.
  void prepare(Device& device);
  // Does the steps up to the next phase, and returns that, valid until next() is called again; null
  // when all is done.
  const Request* next(Device& device);

  const Request& request() const noexcept { return *request_; }
  const Decision& decision() const noexcept { return decision_; }
  bool feeds_back() const noexcept { return feeds_back_; }
  // Returns the elements of each array (array_counts).
  const std::vector<std::uint64_t>& counts() const noexcept { return counts_; }
  // Returns, with feedback, where each array lies in its key.
  const std::vector<KeyOffset>& key_offsets() const noexcept { return key_offsets_; }
  // Returns a request for a phase, without arrays: algorithm "auto", and the label that ranks
  // compare.
  Request phase(Collective collective, DType dtype, ReduceOp op) const;
  const Request& sum_of_lefts() { return sum(lefts_); }  // the first phase of lowrank

  // Sets the label of phases, which must stay.
  void label(std::string_view label) noexcept { label_ = label; }

 private:
  enum class Step : std::uint8_t;
  static std::span<const Step> steps_of(Method method, bool alone);
  const Request* take(Step step, Device& device);
  void place_arrays();
  void take_matrices(Device& device);
  float* output(std::size_t array, std::size_t offset) const;
  const Request& sum(const std::vector<Array>& arrays);

  const Request* request_ = nullptr;
  Decision decision_;
  bool feeds_back_ = false;
  std::string_view label_;
  std::span<const Step> steps_;  // that are left
  std::vector<std::uint64_t> counts_;
  std::vector<KeyOffset> key_offsets_;
  std::vector<SummedArray> arrays_;  // of lowrank: those that travel as they are
  std::vector<Matrix> matrices_;
  std::vector<Array> lefts_, rights_;  // what the two sums of factors add
  Request phase_;
};

}  // namespace gradwire::exec
