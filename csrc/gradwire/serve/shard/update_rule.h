// UpdateRule: how a shard applies a gradient to its parameters, in one pass over both. The
// arithmetic is binary32 with fused multiply-adds, and the same bits on every instruction set.
#pragma once

#include <cstdint>
#include <functional>
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

struct UpdateRule {
  // Updates w[0, n) with the finite gradient g. `states` are those of the rule, of the same
  // elements. `step` counts the updates of these elements, from 1.
  using Apply = std::function<void(float* w, std::span<float* const> states, const float* g,
                                   float rate, std::uint64_t step, std::size_t n)>;

  std::string name{};  // the canonical spec: make_rule(name).name == name
  float rate = 0;
  std::vector<RuleState> states{};
  Apply apply{};  // none: the rule `staged`
};

// The rule of tables whose pushes are kept until a coordinator adds them up: see Vectors.
inline constexpr std::string_view kStaged = "staged";

// Makes one of
//   sgd:rate=…                                    w −= γ·g, torch.optim.SGD's bits
//   momentum:rate=…,momentum=0.9,nesterov=no|yes  v = μ·v + g; w −= γ·v, or γ·(g + μ·v)
//   adagrad:rate=…,epsilon=1e-10                  s += g², s₀ = ε; w −= γ·g / √s
//                                                 (Dean et al. 2012, sec. 4.1: √(ε + Σg²))
//   adam:rate=…,beta1=0.9,beta2=0.999,epsilon=1e-8    (Kingma & Ba 2015, algorithm 1)
//   staged                                        nothing
// Throws InvalidArgument for anything else.
UpdateRule make_rule(std::string_view spec);

}  // namespace gradwire::serve
