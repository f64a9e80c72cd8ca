// Cost models, and what schedules take by them.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "gradwire/schedule/cost.h"

namespace gradwire::schedule {

inline constexpr double kBytes = 1 << 20;
// What links cost by default: shared memory, sockets between hosts, and sockets held to a rate.
inline constexpr LinkCost kMemory{1.5e-7, 2e-7, 0, 0};
inline constexpr LinkCost kTcp{4e-6, 3e-5, 8e-10, 1.5e-10};
inline constexpr LinkCost kEmulated{4e-6, 1e-4, 8e-9, 1.5e-10};

// All costs are zero, and there is a core for every rank.
inline CostModel free_of_cost() {
  CostModel model;
  model.cores = 1000;
  model.codecs[kAnyCodec] = {};
  return model;
}

inline Workload even(const Schedule& schedule, double bytes, int segments = 1) {
  const auto chunks = static_cast<std::size_t>(schedule.chunks);
  return {std::vector<double>(chunks, bytes / schedule.chunks), segments};
}

inline double seconds(const Schedule& schedule, const CostModel& model, double bytes = kBytes,
                      int segments = 1) {
  return simulate(schedule, model, even(schedule, bytes, segments));
}

// What these cost depends on the order of arrivals, which any slower part may change.
inline bool of_arrivals(const std::string& name) {
  return name.ends_with(".mixed") || name.ends_with(".burst");
}

inline CostModel random_model(std::mt19937& random) {
  std::uniform_real_distribution<double> value(0.1, 1.0);
  CostModel model = free_of_cost();
  for (const auto& [name, _] : model.parameters()) {
    const bool of_a_byte =
        name.ends_with("beta") || name.ends_with("copy") || name == "move" || name == "gamma";
    if (name.starts_with("far"))
      model.set(name, 1 + value(random));
    else if (name != "cores" && name != "sharing" && !of_arrivals(name))
      model.set(name, value(random) * (of_a_byte ? 1e-9 : 1e-5));
  }
  return model;
}

}  // namespace gradwire::schedule
