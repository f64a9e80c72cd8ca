#include "gradwire/exec/compound/agreed.h"

namespace gradwire::exec {

const Request* Agreed::next(const Progress& progress) {
  switch (phase_++) {
    case 0:
      return &whole();
    case 1:
      return ask_all(progress.finite);
    default:
      settle_agreed();
      return nullptr;
  }
}

}  // namespace gradwire::exec
