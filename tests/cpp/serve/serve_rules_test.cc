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

// What a rule computes, an element at a time; the header of each line is the rule's definition.
struct Element {
  float w, first, second;
};
Element sgd(Element e, float g) { return {std::fmaf(-0.1F, g, e.w), e.first, e.second}; }
Element momentum(Element e, float g) {
  const float v = 0.9F * e.first + g;
  return {std::fmaf(-0.1F, v, e.w), v, e.second};
}
Element nesterov(Element e, float g) {
  const float v = 0.9F * e.first + g;
  return {std::fmaf(-0.1F, std::fmaf(0.9F, v, g), e.w), v, e.second};
}
Element adagrad(Element e, float g) {
  const float s = std::fmaf(g, g, e.first);
  return {e.w + -0.1F * g / std::sqrt(s), s, e.second};
}
Element adam(Element e, float g) {
  const auto beta = [](double each) { return static_cast<float>(each); };
  const float m = std::fmaf(beta(1 - 0.9), g - e.first, e.first);
  const float v = std::fmaf(g * beta(1 - 0.999), g, e.second * beta(0.999));
  const auto correction = static_cast<float>(std::sqrt(1 - std::pow(0.999, 3.0)));
  const auto step = static_cast<float>(double{0.1F} / (1 - std::pow(0.9, 3.0)));
  return {e.w - m * step / (std::sqrt(v) / correction + 1e-8F), m, v};
}

struct Case {
  const char* rule;
  Element (*reference)(Element, float);
};
constexpr Case kCases[] = {{"sgd:rate=0.1", sgd},
                           {"momentum:rate=0.1", momentum},
                           {"momentum:rate=0.1,nesterov=yes", nesterov},
                           {"adagrad:rate=0.1", adagrad},
                           {"adam:rate=0.1", adam}};

TEST(Rules, ComputeWhatTheyAreDefinedAs) {
  const codec::FloatEnvironment environment;
  constexpr std::size_t kN = 1037;  // not a multiple of any vector
  const auto g = values(kN, 1);
  for (const Case& each : kCases) {
    auto w = values(kN, 2), first = squares(kN, 3), second = squares(kN, 4);
    std::vector<Element> expected(kN);
    for (std::size_t i = 0; i < kN; ++i)
      expected[i] = each.reference({w[i], first[i], second[i]}, g[i]);
    float* states[] = {first.data(), second.data()};
    make_rule(each.rule)->apply(w.data(), states, g.data(), 0.1F, 3, kN);
    for (std::size_t i = 0; i < kN; ++i) {
      ASSERT_EQ(w[i], expected[i].w) << each.rule << " " << i;
      ASSERT_EQ(first[i], expected[i].first) << each.rule << " " << i;
      ASSERT_EQ(second[i], expected[i].second) << each.rule << " " << i;
    }
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
  EXPECT_EQ(make_rule("adagrad:rate=0.02")->name(), "adagrad:rate=0.02");
  EXPECT_EQ(make_rule("momentum:nesterov=yes,momentum=0.9,rate=0.5")->name(),
            make_rule("momentum:rate=0.5,nesterov=yes")->name());
  EXPECT_EQ(make_rule("adagrad:epsilon=0.25")->states()[0].initial, 0.25F);
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
}

}  // namespace serve_rules_test
}  // namespace gradwire::serve
