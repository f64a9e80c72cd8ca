// Exchange: every rank's payload on every rank, for codecs that this library does not know (written
// in Python): they encode before it and decode after it, on threads of their caller.
#pragma once

#include <cstddef>
#include <vector>

#include "gradwire/codec/feedback.h"
#include "gradwire/exec/compound/compound.h"
#include "gradwire/exec/compound/payloads.h"

namespace gradwire::exec {

// What goes in, and what is there when the Work is over. The caller keeps it.
struct Letters {
  std::vector<std::byte> own;
  bool finite = true;             // what `own` stands for
  std::size_t limit = 0;          // bytes of any rank's payload
  std::vector<std::byte> all;     // one rank's after the other
  std::vector<std::size_t> ends;  // by rank, in `all`
  bool all_finite = true;

  // Of the call's keys, where it feeds back: settled by whoever decodes, or when the call fails.
  std::shared_ptr<codec::ErrorFeedback> feedback;
  codec::ErrorFeedback::Transaction transaction;
};

class Exchange final : public Compound {
 public:
  const Request& probe() override { return payloads_.lengths(0); }
  const Request* next(const Progress& progress) override;
  void roll_back() noexcept override { whole().letters->transaction.settle(false); }

 private:
  void begin() override;
  void hand_over();

  int phase_ = 0;
  Payloads payloads_;
};

}  // namespace gradwire::exec
