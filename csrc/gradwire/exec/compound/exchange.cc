#include "gradwire/exec/compound/exchange.h"

#include "gradwire/exec/plan/gather_algorithm.h"

namespace gradwire::exec {

void Exchange::begin() {
  phase_ = 0;
  Request gather = phase(Collective::kAllGather, DType::kUInt8, ReduceOp::kSum);
  gather.algorithm = gather_algorithm(original());
  payloads_.start(gather, rank(), size());
}

const Request* Exchange::next(const Progress&) {
  const ExchangePayloads& payloads = *original().payloads;
  switch (phase_++) {
    case 0:
      payloads_.own() = payloads.own;
      return &payloads_.lengths(payloads.own.size(), payloads.finite);
    case 1:
      return &payloads_.bytes(payloads.limit);
    default:
      hand_over();
      return nullptr;
  }
}

void Exchange::hand_over() {
  ExchangePayloads& payloads = *original().payloads;
  for (Rank r = 0; r < size(); ++r) {
    const ConstBytes payload = payloads_.of(r);
    payloads.all.insert(payloads.all.end(), payload.begin(), payload.end());
    payloads.ends.push_back(payloads.all.size());
  }
  payloads.all_finite = payloads_.all_flagged();
}

}  // namespace gradwire::exec
