// LowRankReduce: an all_reduce in which matrices travel as two factors (codec/lowrank.h). One
// all_reduce carries all of a call's left factors, together with everything that is not worth
// factoring; another one carries all right factors.
#pragma once

#include <span>
#include <vector>

#include "gradwire/codec/lowrank.h"
#include "gradwire/exec/compound/compound.h"
#include "gradwire/exec/execution/feedback_view.h"

namespace gradwire::exec {

// Throws InvalidArgument or ScheduleError if the request is no valid call of this codec.
void check_lowrank(const Request& request);

class LowRankReduce final : public CompoundCollective {
 public:
  const Request& probe() override { return exchange(lefts_); }
  // Computes P = V·q. Input plus residual take the place of the output.
  void prepare() override;
  const Request* next(const Progress& progress) override;

 private:
  struct Matrix {
    std::size_t extent = 0;
    codec::Factors of;
    std::size_t left = 0;   // where its factors begin in left_ and right_
    std::size_t right = 0;  // likewise in own_right_
    std::size_t key = 0;    // with feedback: the key, and where its own q begins in the memory
    std::size_t memory = 0;

    std::size_t left_size() const { return of.rows * of.rank; }
    std::size_t right_size() const { return of.columns * of.rank; }
  };

  void begin() override;
  void list_matrices(std::size_t rank);
  void list_exchanges();
  void place_in_keys();

  bool orthonormalise();
  void finish();
  void remember();
  const Request& exchange(const std::vector<Array>& arrays);

  static std::span<float> of_matrix(std::vector<float>& rights, const Matrix& matrix) {
    return std::span(rights).subspan(matrix.right, matrix.right_size());
  }
  const float* input(std::size_t extent) const;
  float* output(std::size_t extent) const;
  const float* values(const Matrix& matrix) const;
  const float* input_with_narrow(std::size_t extent) const;
  void product_by_rows(codec::LowRankResult result, const Matrix& matrix);
  const codec::EncodeContext& context(const Matrix& matrix) const;
  std::span<const float> last_right(const Matrix& matrix);

  int phase_ = 0;
  FeedbackView feedback_;
  std::vector<Matrix> matrices_;
  std::vector<std::size_t> plain_;  // extents that are not factored
  std::vector<float> left_, right_, own_right_;
  std::vector<double> room_;
  std::vector<float> rows_of_left_, error_;  // of a few rows, where residuals are narrow
  std::vector<Array> lefts_, rights_;        // what the two all_reduces sum
  Request current_;
};

}  // namespace gradwire::exec
