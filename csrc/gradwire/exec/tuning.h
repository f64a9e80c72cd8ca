// Tuning: the settings of a communicator, besides its Identity; and its lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "gradwire/base/log.h"
#include "gradwire/base/stop_request.h"
#include "gradwire/base/wire.h"
#include "gradwire/exec/control/observer.h"
#include "gradwire/exec/progress_thread.h"
#include "gradwire/transport/kind.h"

namespace gradwire::exec {

enum class Lane : std::uint8_t { kCollective, kPointToPoint };

struct Tuning {
  std::size_t max_message = kUsualFrame;  // bytes of the largest frame; the same on all ranks
  std::size_t segment_bytes = 0;          // 0: chosen for each operation
  double stall_seconds = 30;              // see StallMonitor; 0: never
  Log log = log_to_stderr;                // gets stalls, and errors that no call would report
  std::shared_ptr<Observer> observer = nullptr;  // of this rank's calls
  transport::Contexts contexts{};                // this process's, for transports that need one
  std::shared_ptr<const StopRequest> stop_request = nullptr;  // this process's; null: none
  std::shared_ptr<ProgressThread> progress = nullptr;         // shared with others; null: its own
};

}  // namespace gradwire::exec
