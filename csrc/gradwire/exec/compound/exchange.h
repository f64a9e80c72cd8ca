// Exchange: brings every rank's payload to every rank. It serves codecs written in Python, which
// encode before it and decode after it, on the caller's threads.
#pragma once

#include <cstddef>
#include <vector>

#include "gradwire/codec/feedback/feedback.h"
#include "gradwire/exec/compound/compound.h"
#include "gradwire/exec/compound/payloads.h"

namespace gradwire::exec {

// This rank's payload and, when the Work is over, every rank's. The caller keeps it alive.
struct ExchangePayloads {
  std::vector<std::byte> own;
  bool finite = true;             // whether the values that `own` encodes are
  std::size_t limit = 0;          // bytes of any rank's payload
  std::vector<std::byte> all;     // the payloads of all ranks, end to end
  std::vector<std::size_t> ends;  // by rank: the end of its payload in `all`
  bool all_finite = true;

  // The call's keys, if it feeds back. Whoever decodes settles them, or the call's failure does.
  std::shared_ptr<codec::ErrorFeedback> feedback;
  codec::ErrorFeedback::Transaction transaction;
};

class Exchange final : public CompoundCollective {
 public:
  const Request& probe() override { return payloads_.lengths(0); }
  const Request* next(const Progress& progress) override;
  void roll_back() noexcept override { original().payloads->transaction.settle(false); }

 private:
  void begin() override;
  void hand_over();

  int phase_ = 0;
  Payloads payloads_;
};

}  // namespace gradwire::exec
