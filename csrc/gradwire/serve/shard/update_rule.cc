#include "gradwire/serve/shard/update_rule.h"

#include <algorithm>
#include <cmath>

#include "gradwire/base/named.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::serve {
namespace {

const codec::RuleKernels& rules() { return codec::kernels().rules; }

class Rule : public UpdateRule {
 public:
  explicit Rule(codec::Parameters& parameters)
      : rate_(static_cast<float>(parameters.real("rate", 0.01, 0, 1e30))) {}
  std::string name() const final { return name_; }
  float rate() const noexcept final { return rate_; }
  void set_name(std::string name) { name_ = std::move(name); }

 private:
  float rate_;
  std::string name_;
};

class Sgd final : public Rule {
 public:
  using Rule::Rule;
  void apply(float* w, std::span<float* const>, const float* g, float rate, std::uint64_t,
             std::size_t n) const noexcept override {
    rules().sgd(w, g, rate, n);
  }
};

class Momentum final : public Rule {
 public:
  explicit Momentum(codec::Parameters& parameters)
      : Rule(parameters),
        momentum_(static_cast<float>(parameters.real("momentum", 0.9, 0, 1))),
        update_(parameters.choice("nesterov", {"no", "yes"}) == "yes" ? rules().nesterov
                                                                      : rules().momentum) {}
  std::vector<RuleState> states() const override { return {{"velocity", 0}}; }
  void apply(float* w, std::span<float* const> states, const float* g, float rate, std::uint64_t,
             std::size_t n) const noexcept override {
    update_(w, states[0], g, rate, momentum_, n);
  }

 private:
  float momentum_;
  decltype(codec::RuleKernels::momentum) update_;
};

class Adagrad final : public Rule {
 public:
  explicit Adagrad(codec::Parameters& parameters)
      : Rule(parameters),
        epsilon_(static_cast<float>(parameters.real("epsilon", 1e-10, 1e-30, 1e30))) {}
  std::vector<RuleState> states() const override { return {{"squares", epsilon_}}; }
  void apply(float* w, std::span<float* const> states, const float* g, float rate, std::uint64_t,
             std::size_t n) const noexcept override {
    rules().adagrad(w, states[0], g, rate, n);
  }

 private:
  float epsilon_;
};

class Adam final : public Rule {
 public:
  explicit Adam(codec::Parameters& parameters)
      : Rule(parameters),
        beta1_(parameters.real("beta1", 0.9, 0, 0.999999)),
        beta2_(parameters.real("beta2", 0.999, 0, 0.999999)),
        epsilon_(parameters.real("epsilon", 1e-8, 1e-30, 1e30)) {}
  std::vector<RuleState> states() const override { return {{"mean", 0}, {"squares", 0}}; }
  void apply(float* w, std::span<float* const> states, const float* g, float rate,
             std::uint64_t step, std::size_t n) const noexcept override {
    const auto t = static_cast<double>(step);
    codec::AdamStep adam;
    adam.of_mean = static_cast<float>(1 - beta1_);
    adam.of_square = static_cast<float>(1 - beta2_);
    adam.kept_square = static_cast<float>(beta2_);
    adam.root_of_correction = static_cast<float>(std::sqrt(1 - std::pow(beta2_, t)));
    adam.epsilon = static_cast<float>(epsilon_);
    adam.step = static_cast<float>(double{rate} / (1 - std::pow(beta1_, t)));
    rules().adam(w, states[0], states[1], g, adam, n);
  }

 private:
  double beta1_, beta2_, epsilon_;
};

class Staged final : public UpdateRule {
 public:
  std::string name() const override { return std::string(kStaged); }
  float rate() const noexcept override { return 0; }
  void apply(float*, std::span<float* const>, const float*, float, std::uint64_t,
             std::size_t) const noexcept override {}
};

std::shared_ptr<const UpdateRule> make_staged(codec::Parameters& parameters) {
  parameters.finish();
  return std::make_shared<Staged>();
}

template <typename Made>
std::shared_ptr<const UpdateRule> make(codec::Parameters& parameters) {
  auto rule = std::make_shared<Made>(parameters);
  parameters.finish();
  rule->set_name(parameters.canonical());
  return rule;
}

struct NamedRule {
  std::string_view name;
  std::shared_ptr<const UpdateRule> (*make)(codec::Parameters&);
};
constexpr NamedRule kRules[] = {{"sgd", make<Sgd>},
                                {"momentum", make<Momentum>},
                                {"adagrad", make<Adagrad>},
                                {"adam", make<Adam>},
                                {kStaged, make_staged}};

}  // namespace

std::shared_ptr<const UpdateRule> make_rule(std::string_view spec) {
  const std::string_view name = spec.substr(0, spec.find(':'));
  const std::string_view rest = spec.substr(std::min(spec.size(), name.size() + 1));
  const NamedRule& rule = find_named("rule", kRules, name, &NamedRule::name);
  codec::Parameters parameters(name, rest, "rule");
  return rule.make(parameters);
}

}  // namespace gradwire::serve
