#include "gradwire/exec/compound/exchange.h"

#include "gradwire/exec/plan/gather_algorithm.h"

namespace gradwire::exec {

void Exchange::begin() {
  phase_ = 0;
  Request gather = phase(Collective::kAllGather, DType::kUInt8, ReduceOp::kSum);
  gather.algorithm = gather_algorithm(whole());
  payloads_.start(gather, rank(), size());
}

const Request* Exchange::next(const Progress&) {
  const Letters& letters = *whole().letters;
  switch (phase_++) {
    case 0:
      payloads_.own() = letters.own;
      return &payloads_.lengths(letters.own.size(), letters.finite);
    case 1:
      return &payloads_.bytes(letters.limit);
    default:
      hand_over();
      return nullptr;
  }
}

void Exchange::hand_over() {
  Letters& letters = *whole().letters;
  for (Rank r = 0; r < size(); ++r) {
    const ConstBytes payload = payloads_.of(r);
    letters.all.insert(letters.all.end(), payload.begin(), payload.end());
    letters.ends.push_back(letters.all.size());
  }
  letters.all_finite = payloads_.all_flagged();
}

}  // namespace gradwire::exec
