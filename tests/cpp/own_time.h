// How long a process takes by itself, however busy the machine is.
#pragma once

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace gradwire {

class OwnTime {
 public:
  // Seconds since it was made, less those in which threads of this process, all that still are,
  // were ready to run and had no processor.
  double seconds() const {
    const std::chrono::duration<double> passed = Clock::now() - begun_;
    double waited = 0;
    for (const auto& [thread, now] : queued()) {
      const auto before = queued_.find(thread);
      waited += now - (before == queued_.end() ? 0 : before->second);
    }
    return passed.count() - waited;
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Seconds of each thread, where the kernel counts them.
  static std::map<std::string, double> queued() {
    std::map<std::string, double> found;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      double ran = 0, waited = 0;  // nanoseconds
      if (std::ifstream(task.path() / "schedstat") >> ran >> waited)
        found[task.path().filename()] = waited / 1e9;
    }
    return found;
  }

  std::map<std::string, double> queued_ = queued();
  Clock::time_point begun_ = Clock::now();
};

}  // namespace gradwire
