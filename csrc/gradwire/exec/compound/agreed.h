// Agreed: a reduction whose ranks hold different results, or none, and then agree on them.
#pragma once

#include "gradwire/exec/compound/compound.h"

namespace gradwire::exec {

class Agreed final : public Compound {
 public:
  const Request& probe() override { return whole(); }
  const Request* next(const Progress& progress) override;

 private:
  void begin() override { phase_ = 0; }

  int phase_ = 0;
};

}  // namespace gradwire::exec
