// Exchange: every rank's payload on every rank, for codecs that this library does not know (written
// in Python): they encode before it and decode after it, on threads of their caller.
#pragma once

#include <cstddef>
#include <vector>

#include "gradwire/exec/compound.h"
#include "gradwire/exec/payloads.h"

namespace gradwire::exec {

// What goes in, and what is there when the Work is over. The caller keeps it.
struct Letters {
  std::vector<std::byte> own;
  bool finite = true;                       // what `own` stands for
  std::size_t limit = 0;                    // bytes of any rank's payload
  std::vector<std::vector<std::byte>> all;  // by rank
  bool all_finite = true;
};

class Exchange final : public Compound {
 public:
  const Request& probe() override { return payloads_.lengths(0, false); }
  const Request* next(const Progress& progress) override;

 private:
  void begin() override;
  void hand_over();

  int phase_ = 0;
  Payloads payloads_;
};

}  // namespace gradwire::exec
