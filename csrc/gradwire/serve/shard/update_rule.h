// UpdateRule: how a shard applies a gradient to its parameters, in one pass over both. The
// arithmetic is binary32 with fused multiply-adds, and the same bits on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gradwire::serve {

// State that a rule keeps for each parameter element.
struct RuleState {
  std::string_view name;
  float initial = 0;
};

// When a round of pushes ends: all clients that it expects have pushed, or `quorum` of them have
// and `grace` seconds have passed since, or `patience` seconds since the first.
struct RoundLimits {
  std::size_t quorum = 1;
  double grace = 0;
  double patience = kLeastPatience;

  static constexpr double kLeastPatience = 60;
};

// Weights of pushes of a round, so that neither their sum nor a mean is lost to rounding.
inline constexpr float kLeastWeight = 1e-30F;
inline constexpr float kMostWeight = 1e30F;

struct UpdateRule {
  // Updates w[0, n) with the finite gradient g. `states` are those of the rule, of the same
  // elements. `step` counts the updates of these elements, from 1.
  using Apply = std::function<void(float* w, std::span<float* const> states, const float* g,
                                   float rate, std::uint64_t step, std::size_t n)>;

  // Updates w[0, n) with the pushes of a round, whose weights add up to `weight`.
  using EndRound =
      std::function<void(float* w, std::span<float* const> states, float weight, std::size_t n)>;

  std::string name{};  // the canonical spec: make_rule(name).name == name
  float rate = 0;      // of pushes that have none of their own
  std::vector<RuleState> states{};
  Apply apply{};  // none: the rule `staged`
  // The rule `rounds`: apply() adds a push to the others of its round, at its rate as a weight.
  std::optional<RoundLimits> rounds{};
  EndRound end_round{};
};

// The state of the rule `rounds` that holds the sum of the open round's pushes.
inline constexpr std::string_view kRoundSum = "sum";

// The rule of tables whose pushes are kept until a coordinator adds them up: see Vectors.
inline constexpr std::string_view kStaged = "staged";

// Makes one of
//   sgd:rate=…                                    w −= γ·g, torch.optim.SGD's bits
//   momentum:rate=…,momentum=0.9,nesterov=no|yes  v = μ·v + g; w −= γ·v, or γ·(g + μ·v)
//   adagrad:rate=…,epsilon=1e-10                  s += g², s₀ = ε; w −= γ·g / √s
//                                                 (Dean et al. 2012, sec. 4.1: √(ε + Σg²))
//   adam:rate=…,beta1=0.9,beta2=0.999,epsilon=1e-8    (Kingma & Ba 2015, algorithm 1)
//   rounds:rate=…,momentum=0.9,nesterov=yes|no,quorum=1,grace=10
//                                                 g = the mean of a round's pushes by weight; then
//                                                 as momentum
//   staged                                        nothing
// Throws InvalidArgument for anything else.
UpdateRule make_rule(std::string_view spec);

}  // namespace gradwire::serve
