#include "gradwire/exec/compound/agreed_reduce.h"

namespace gradwire::exec {

const Request* AgreedReduce::next(const Progress& progress) {
  switch (phase_++) {
    case 0:
      return &original();
    case 1:
      return vote_finite(progress.finite);
    default:
      settle_vote();
      return nullptr;
  }
}

}  // namespace gradwire::exec
