#include <algorithm>
#include <cmath>

#include "serve_job.h"

namespace gradwire::serve {
namespace serve_rules_test {

using codec::Kernels;

std::vector<float> values(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.1F);
  std::vector<float> made(n);
  for (float& x : made) x = normal(random);
  return made;
}

std::vector<float> squares(std::size_t n, unsigned seed) {
  std::vector<float> made = values(n, seed);
  for (float& x : made) x = x * x + 1e-10F;
  return made;
}

// The rules as their papers write them, in binary64.
struct Element {
  double w, first, second;
};
Element sgd(Element e, double g, double rate, double) {
  return {e.w - rate * g, e.first, e.second};
}
Element momentum(Element e, double g, double rate, double) {
  const double v = 0.75 * e.first + g;
  return {e.w - rate * v, v, e.second};
}
Element nesterov(Element e, double g, double rate, double) {
  const double v = 0.75 * e.first + g;
  return {e.w - rate * (g + 0.75 * v), v, e.second};
}
Element adagrad(Element e, double g, double rate, double) {
  const double s = e.first + g * g;
  return {e.w - rate * g / std::sqrt(s), s, e.second};
}
Element adam(Element e, double g, double rate, double t) {
  const double m = 0.75 * e.first + 0.25 * g, v = 0.96 * e.second + 0.04 * g * g;
  const double mean = m / (1 - std::pow(0.75, t)), square = v / (1 - std::pow(0.96, t));
  return {e.w - rate * mean / (std::sqrt(square) + 0.01), m, v};
}

struct Case {
  const char* rule;
  Element (*reference)(Element, double g, double rate, double step);
};
constexpr Case kCases[] = {{"sgd:rate=0.5", sgd},
                           {"momentum:rate=0.5,momentum=0.75", momentum},
                           {"momentum:rate=0.5,momentum=0.75,nesterov=yes", nesterov},
                           {"adagrad:rate=0.5", adagrad},
                           {"adam:rate=0.5,beta1=0.75,beta2=0.96,epsilon=0.01", adam}};

// Some roundings of binary32: of the largest of what is added up, where values are about 0.1.
double allowed(double before, double after) {
  return 0x1p-21 * std::max({std::fabs(before), std::fabs(after), std::fabs(after - before), 0.1});
}

TEST(Rules, ComputeWhatTheirPapersSay) {
  const codec::FloatEnvironment environment;
  constexpr std::size_t kN = 1037;  // not a multiple of any vector
  constexpr float kRate = 0.3F;     // a push's own
  const auto g = values(kN, 1);
  for (const Case& each : kCases)
    for (const std::uint64_t step : {1, 3, 1000}) {
      auto w = values(kN, 2), first = squares(kN, 3), second = squares(kN, 4);
      const auto w0 = w, first0 = first, second0 = second;
      float* states[] = {first.data(), second.data()};
      make_rule(each.rule).apply(w.data(), states, g.data(), kRate, step, kN);
      for (std::size_t i = 0; i < kN; ++i) {
        const Element before{w0[i], first0[i], second0[i]};
        const Element after =
            each.reference(before, double{g[i]}, double{kRate}, static_cast<double>(step));
        ASSERT_NEAR(w[i], after.w, allowed(before.w, after.w)) << each.rule << " " << i;
        ASSERT_NEAR(first[i], after.first, allowed(before.first, after.first)) << each.rule;
        ASSERT_NEAR(second[i], after.second, allowed(before.second, after.second)) << each.rule;
      }
    }
}

// Five steps of torch.optim (2.13.0) with the same parameters; Adagrad's ε is its initial sum
// there.
//   w[i] = (i − 2) / 4, and g[i] = ((7 i + 5 t) mod 11 − 5) / 8 in step t = 1 … 5.
struct Recorded {
  const char* rule;
  std::vector<float> w;
};
const Recorded kRecorded[] = {
    {"sgd:rate=0.25", {-0.6875F, -0.15625F, 0.03125F, 0.21875F, 0.40625F, 0.9375F}},
    {"momentum:rate=0.25,momentum=0.75",
     {-1.01123047F, 0.250976562F, 0.0133056641F, 0.0777587891F, 0.545043945F, 1.10229492F}},
    {"momentum:rate=0.25,momentum=0.75,nesterov=yes",
     {-1.07092285F, 0.219482422F, 0.041229248F, 0.0895690918F, 0.440032959F, 1.20172119F}},
    {"adagrad:rate=0.25,epsilon=0.0625",
     {-0.763206959F, -0.0449929461F, -0.0299913958F, 0.229335517F, 0.477047592F, 0.904124141F}},
    {"adam:rate=0.25,beta1=0.75,beta2=0.875,epsilon=0.125",
     {-0.90983963F, 0.254523903F, -0.112346113F, 0.176112577F, 0.690333903F, 0.895001888F}},
};

TEST(Rules, GoWhereTorchsOptimizersGo) {
  const codec::FloatEnvironment environment;
  for (const Recorded& each : kRecorded) {
    const auto rule = make_rule(each.rule);
    std::vector<float> w, g(each.w.size());
    for (std::size_t i = 0; i < g.size(); ++i) w.push_back((static_cast<float>(i) - 2) / 4);
    std::vector<std::vector<float>> kept;
    for (const RuleState& state : rule.states) kept.emplace_back(g.size(), state.initial);
    std::vector<float*> states;
    for (auto& state : kept) states.push_back(state.data());
    for (std::uint64_t step = 1; step <= 5; ++step) {
      for (std::size_t i = 0; i < g.size(); ++i)
        g[i] = (static_cast<float>((7 * i + 5 * step) % 11) - 5) / 8;
      rule.apply(w.data(), states, g.data(), rule.rate, step, g.size());
    }
    for (std::size_t i = 0; i < w.size(); ++i) EXPECT_NEAR(w[i], each.w[i], 1e-6) << each.rule;
  }
}

TEST(Rules, HaveTheSameBitsOnAllInstructionSets) {
  const codec::FloatEnvironment environment;
  const codec::AdamStep adam{0.1F, 0.001F, 0.999F, 0.05F, 1e-8F, 0.3F};
  for (const std::size_t n :
       {std::size_t{1}, std::size_t{15}, std::size_t{16}, std::size_t{4111}}) {
    const auto g = values(n, 5);
    std::vector<std::vector<float>> first;
    for (const Kernels* table : codec::available_kernels()) {
      auto w = values(n, 6), a = squares(n, 7), b = squares(n, 8);
      table->rules.sgd(w.data(), g.data(), 0.3F, n);
      table->rules.momentum(w.data(), a.data(), g.data(), 0.3F, 0.9F, n);
      table->rules.nesterov(w.data(), a.data(), g.data(), 0.3F, 0.9F, n);
      for (float& each : a) each = std::fabs(each);
      table->rules.adagrad(w.data(), a.data(), g.data(), 0.3F, n);
      table->rules.adam(w.data(), a.data(), b.data(), g.data(), adam, n);
      if (first.empty()) first = {w, a, b};
      EXPECT_TRUE(same_bits(w, first[0]) && same_bits(a, first[1]) && same_bits(b, first[2]))
          << table->name << ", " << n;
    }
  }
}

TEST(Rules, HaveCanonicalNames) {
  EXPECT_EQ(make_rule("adagrad:rate=0.02").name, "adagrad:rate=0.02");
  EXPECT_EQ(make_rule("momentum:nesterov=yes,momentum=0.9,rate=0.5").name,
            make_rule("momentum:rate=0.5,nesterov=yes").name);
  EXPECT_EQ(make_rule("adagrad:epsilon=0.25").states[0].initial, 0.25F);
}

TEST(Rules, HaveTheDefaultsThatTheirHeaderNames) {
  EXPECT_EQ(make_rule("momentum:rate=0.1").name,
            make_rule("momentum:rate=0.1,momentum=0.9,nesterov=no").name);
  EXPECT_EQ(make_rule("adagrad:rate=0.1").states[0].initial, 1e-10F);
  EXPECT_EQ(make_rule("adam:rate=0.1").name,
            make_rule("adam:rate=0.1,beta1=0.9,beta2=0.999,epsilon=1e-8").name);
  EXPECT_EQ(make_rule("sgd").rate, 0.01F);
  EXPECT_EQ(make_rule("rounds:rate=0.1").name,
            make_rule("rounds:rate=0.1,momentum=0.9,nesterov=yes,quorum=1,grace=10").name);
  EXPECT_EQ(make_rule("rounds:rate=0.1").rate, 1);  // the weight of a push
}

TEST(Rules, TakeWhatIsInTheirRanges) {
  for (const char* good :
       {"sgd:rate=0", "sgd:rate=1e30", "momentum:momentum=0", "momentum:momentum=1",
        "adagrad:epsilon=1e-30", "adagrad:epsilon=1e30", "adam:beta1=0,beta2=0",
        "adam:beta1=0.999999,beta2=0.999999", "adam:epsilon=1e-30", "adam:epsilon=1e30",
        "rounds:quorum=1", "rounds:momentum=0,grace=0", "rounds:grace=1e9"})
    EXPECT_NO_THROW(make_rule(good)) << good;
  for (const char* wrong :
       {"sgd:rate=1.1e30", "momentum:momentum=1.1", "momentum:momentum=-0.1",
        "adagrad:epsilon=9e-31", "adagrad:epsilon=1.1e30", "adam:beta1=-0.1", "adam:beta2=-0.1",
        "adam:beta2=1", "adam:epsilon=9e-31", "adam:epsilon=1.1e30", "rounds:quorum=0",
        "rounds:quorum=1.5", "rounds:grace=-1", "rounds:momentum=1.1"})
    EXPECT_THROW(make_rule(wrong), InvalidArgument) << wrong;
}

TEST(Rules, SayWhatIsWrong) {
  for (const char* wrong : {"", "sgb", "sgd:rate=-1", "sgd:momentum=0.9", "adagrad:epsilon=0",
                            "momentum:nesterov=maybe", "adam:beta1=1"})
    EXPECT_THROW(make_rule(wrong), InvalidArgument) << wrong;
  try {
    make_rule("sgd:momentum=0.9");
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("rule sgd: unknown parameter"))
        << error.what();
  }
  try {
    make_rule("sgb:rate=1");
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "unknown rule 'sgb'; use one of: sgd, momentum, adagrad, adam, rounds, staged");
  }
}

}  // namespace serve_rules_test
}  // namespace gradwire::serve
