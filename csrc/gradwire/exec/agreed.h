// Agreed: a reduction whose ranks hold different results, or none, and must all the same agree
// whether residuals may move (contracts 1, transaction).
#pragma once

#include <array>

#include "gradwire/exec/compound.h"

namespace gradwire::exec {

class Agreed final : public Compound {
 public:
  const Request& probe() override { return whole(); }
  const Request* next(const Progress& progress) override;

 private:
  void begin() override { phase_ = 0; }

  int phase_ = 0;
  Request current_;
  std::byte verdict_{};  // 1: this rank's results are finite; then those of all
  Array verdict_array_{&verdict_, 1};
};

}  // namespace gradwire::exec
