#include "gradwire/schedule/cost.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"

namespace gradwire::schedule {
namespace {

constexpr double kMostSeconds = 1000;
constexpr double kMostCores = 1e6;
constexpr double kMostBytes = 1e12;
constexpr double kNearBytes = 64 * 1024;
// Octaves above kNearBytes of 64 KiB, and of the sizes in `far`: 512 KiB, 4, 8, 16 and 32 MiB.
constexpr std::array<double, 6> kOctaves{0, 3, 6, 7, 8, 9};

using Named = std::pair<const char*, double CostModel::*>;
using NamedOfLink = std::pair<const char*, double LinkCost::*>;
constexpr Named kScalars[] = {{"call", &CostModel::call},
                              {"round", &CostModel::round},
                              {"move", &CostModel::move},
                              {"gamma", &CostModel::gamma},
                              {"turn", &CostModel::turn}};
constexpr NamedOfLink kOfLink[] = {{"alpha", &LinkCost::alpha}, {"latency", &LinkCost::latency},
                                   {"beta", &LinkCost::beta},   {"copy", &LinkCost::copy},
                                   {"mixed", &LinkCost::mixed}, {"burst", &LinkCost::burst}};
constexpr const char* kFar[] = {"far.512K", "far.4M", "far.8M", "far.16M", "far.32M"};

// Calls each(name, value) for all parameters but cores and sharing, always in the same order.
// `Model` may be const.
template <typename Model, typename Each>
void visit(Model& model, Each each) {
  for (const auto& [name, member] : kOfLink)
    each(std::string("within.") + name, model.within.*member);
  for (const auto& [name, member] : kOfLink)
    each(std::string("between.") + name, model.between.*member);
  for (const auto& [name, member] : kScalars) each(name, model.*member);
  for (std::size_t i = 0; i < model.far.size(); ++i) each(kFar[i], model.far[i]);
  for (auto& [codec, cost] : model.codecs) {
    each(codec + ".encode", cost.encode);
    each(codec + ".decode", cost.decode);
  }
}

void require(bool fits, const std::string& name, double value) {
  if (!fits)
    throw InvalidArgument("cost model: " + name + " = " + std::to_string(value) +
                          " is out of range");
}

// Returns the octaves of `bytes` above 64 KiB, interpolated linearly within an octave, so that the
// result does not depend on a library's logarithm.
double octaves(double bytes) {
  int exponent = 0;
  const double fraction = std::frexp(bytes / kNearBytes, &exponent);
  return exponent - 1 + (2 * fraction - 1);
}

}  // namespace

std::vector<std::pair<std::string, double>> CostModel::parameters() const {
  std::vector<std::pair<std::string, double>> all;
  visit(*this, [&](const std::string& name, double value) { all.emplace_back(name, value); });
  all.emplace_back("cores", cores);
  all.emplace_back("sharing", sharing);
  return all;
}

void CostModel::set(const std::string& name, double value) {
  if (name == "cores" || name == "sharing") {
    require(value >= 1 && value <= kMostCores && value == std::floor(value), name, value);
    (name == "cores" ? cores : sharing) = static_cast<int>(value);
    return;
  }
  bool found = false;
  visit(*this, [&](const std::string& each, double& place) {
    if (each != name) return;
    require(value >= 0 && value < (name.ends_with(".burst") ? kMostBytes : kMostSeconds), name,
            value);
    place = value;
    found = true;
  });
  if (!found) throw InvalidArgument("cost model: there is no '" + name + "'");
}

std::uint64_t CostModel::digest() const {
  Fnv1a hash;
  for (const auto& [name, value] : parameters())
    hash.text(name).number(std::bit_cast<std::uint64_t>(value));
  return std::max<std::uint64_t>(1, hash.digest());
}

const CodecCost& CostModel::codec(std::string_view name) const {
  const auto found = codecs.find(std::string(name.substr(0, name.find(':'))));
  return found != codecs.end() ? found->second : codecs.at(kAnyCodec);
}

double CostModel::growth(double bytes) const {
  if (bytes <= kNearBytes) return 1;
  const double at = octaves(bytes);
  if (at >= kOctaves.back()) return far.back();
  std::size_t above = 0;
  while (at >= kOctaves[above + 1]) ++above;
  const double low = above == 0 ? 1 : far[above - 1];
  const double share = (at - kOctaves[above]) / (kOctaves[above + 1] - kOctaves[above]);
  return low + (far[above] - low) * share;
}

double total_bytes(const Workload& work) {
  double sum = 0;
  for (double bytes : work.chunks) sum += bytes;
  return sum;
}

// Values of the order of what two cores of a server reach, with frames of the usual size.
CostModel default_model(const LinkCost& within, const LinkCost& between, int cores) {
  CostModel model;
  model.within = within;
  model.between = between;
  model.call = 5e-7;
  model.move = 5e-11;
  model.gamma = 6e-11;
  model.turn = 2e-6;
  model.cores = std::max(1, cores);
  model.far = {1.1, 1.3, 1.4, 1.5, 1.6};
  model.codecs = {{kAnyCodec, {3e-10, 1e-10}}};
  return model;
}

}  // namespace gradwire::schedule
