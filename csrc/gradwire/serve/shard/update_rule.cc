#include "gradwire/serve/shard/update_rule.h"

#include <algorithm>
#include <cmath>

#include "gradwire/base/named.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::serve {
namespace {

const codec::RuleKernels& rules() { return codec::kernels().rules; }

using States = std::span<float* const>;

float rate_of(codec::Parameters& parameters) {
  return static_cast<float>(parameters.real("rate", 0.01, 0, 1e30));
}

UpdateRule make_sgd(codec::Parameters& parameters) {
  return {.rate = rate_of(parameters),
          .apply = [](float* w, States, const float* g, float rate, std::uint64_t, std::size_t n) {
            rules().sgd(w, g, rate, n);
          }};
}

UpdateRule make_momentum(codec::Parameters& parameters) {
  const float usual = rate_of(parameters);
  const auto momentum = static_cast<float>(parameters.real("momentum", 0.9, 0, 1));
  const bool nesterov = parameters.choice("nesterov", {"no", "yes"}) == "yes";
  const auto update = nesterov ? rules().nesterov : rules().momentum;
  return {.rate = usual,
          .states = {{"velocity", 0}},
          .apply = [=](float* w, States states, const float* g, float rate, std::uint64_t,
                       std::size_t n) { update(w, states[0], g, rate, momentum, n); }};
}

UpdateRule make_adagrad(codec::Parameters& parameters) {
  const float usual = rate_of(parameters);
  const auto epsilon = static_cast<float>(parameters.real("epsilon", 1e-10, 1e-30, 1e30));
  return {.rate = usual,
          .states = {{"squares", epsilon}},
          .apply = [](float* w, States states, const float* g, float rate, std::uint64_t,
                      std::size_t n) { rules().adagrad(w, states[0], g, rate, n); }};
}

UpdateRule make_adam(codec::Parameters& parameters) {
  const float usual = rate_of(parameters);
  const double beta1 = parameters.real("beta1", 0.9, 0, 0.999999);
  const double beta2 = parameters.real("beta2", 0.999, 0, 0.999999);
  const double epsilon = parameters.real("epsilon", 1e-8, 1e-30, 1e30);
  const auto apply = [=](float* w, States states, const float* g, float rate, std::uint64_t step,
                         std::size_t n) {
    const auto t = static_cast<double>(step);
    codec::AdamStep adam;
    adam.of_mean = static_cast<float>(1 - beta1);
    adam.of_square = static_cast<float>(1 - beta2);
    adam.kept_square = static_cast<float>(beta2);
    adam.root_of_correction = static_cast<float>(std::sqrt(1 - std::pow(beta2, t)));
    adam.epsilon = static_cast<float>(epsilon);
    adam.step = static_cast<float>(double{rate} / (1 - std::pow(beta1, t)));
    rules().adam(w, states[0], states[1], g, adam, n);
  };
  return {.rate = usual, .states = {{"mean", 0}, {"squares", 0}}, .apply = apply};
}

UpdateRule make_rounds(codec::Parameters& parameters) {
  const auto rate = static_cast<float>(parameters.real("rate", 0.7, 0, 1e30));
  const auto momentum = static_cast<float>(parameters.real("momentum", 0.9, 0, 1));
  const bool nesterov = parameters.choice("nesterov", {"yes", "no"}) == "yes";
  const auto quorum = static_cast<std::size_t>(parameters.whole("quorum", 1, 1, 1 << 20));
  const double grace = parameters.real("grace", 10, 0, 1e9);
  const double patience = std::max(10 * grace, RoundLimits::kLeastPatience);
  const auto update = nesterov ? rules().nesterov : rules().momentum;
  return {.rate = 1,
          .states = {{"velocity", 0}, {kRoundSum, 0}},
          .apply = [](float*, States states, const float* g, float weight, std::uint64_t,
                      std::size_t n) { rules().sgd(states[1], g, -weight, n); },
          .rounds = RoundLimits{quorum, grace, patience},
          .end_round =
              [=](float* w, States states, float weight, std::size_t n) {
                const std::span<float> mean(states[1], n);
                for (float& x : mean) x /= weight;
                update(w, states[0], mean.data(), rate, momentum, n);
                std::ranges::fill(mean, 0.0F);
              }};
}

struct NamedRule {
  std::string_view name;
  UpdateRule (*make)(codec::Parameters&);
};
constexpr NamedRule kRules[] = {
    {"sgd", make_sgd},         {"momentum", make_momentum},
    {"adagrad", make_adagrad}, {"adam", make_adam},
    {"rounds", make_rounds},   {kStaged, [](codec::Parameters&) { return UpdateRule{}; }}};

}  // namespace

UpdateRule make_rule(std::string_view spec) {
  const std::string_view name = spec.substr(0, spec.find(':'));
  const std::string_view rest = spec.substr(std::min(spec.size(), name.size() + 1));
  const NamedRule& named = find_named("rule", kRules, name, &NamedRule::name);
  codec::Parameters parameters(name, rest, "rule");
  UpdateRule rule = named.make(parameters);
  parameters.finish();
  rule.name = parameters.canonical();
  return rule;
}

}  // namespace gradwire::serve
