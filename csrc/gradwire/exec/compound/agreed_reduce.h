// AgreedReduce: a reduction after which ranks hold different results, or none, so they vote whether
// all results are finite.
#pragma once

#include "gradwire/exec/compound/compound.h"

namespace gradwire::exec {

class AgreedReduce final : public CompoundCollective {
 public:
  const Request& probe() override { return original(); }
  const Request* next(const Progress& progress) override;

 private:
  void begin() override { phase_ = 0; }

  int phase_ = 0;
};

}  // namespace gradwire::exec
