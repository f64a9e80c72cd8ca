#include "gradwire/schedule/generators.h"

#include <array>

#include "gradwire/base/error.h"
#include "gradwire/schedule/families.h"
#include "gradwire/schedule/rules.h"

namespace gradwire::schedule {
namespace {

// The catalogue, best known first.
constexpr std::array kFamilies = {ring_family, butterfly_family, tree_family, direct_family};

const Variant* find(Collective collective, std::string_view algorithm) {
  for (const auto family : kFamilies)
    for (const Variant& variant : family())
      if (variant.collective == collective && variant.algorithm == algorithm) return &variant;
  return nullptr;
}

struct Nesting {
  std::string_view inner;
  std::string_view outer;
};

std::string_view trim(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

// Returns the two names of "hierarchical(inner,outer)"; nullopt for any other algorithm.
std::optional<Nesting> hierarchical_pair(std::string_view algorithm) {
  constexpr std::string_view kOpen = "hierarchical(";
  if (!algorithm.starts_with(kOpen) || !algorithm.ends_with(')')) return std::nullopt;
  algorithm.remove_prefix(kOpen.size());
  algorithm.remove_suffix(1);
  const std::size_t comma = algorithm.find(',');
  if (comma == std::string_view::npos) return std::nullopt;
  return Nesting{trim(algorithm.substr(0, comma)), trim(algorithm.substr(comma + 1))};
}

// Checks the recipe before a generator indexes by its root.
void require_sound(const Recipe& recipe) {
  require_no_fault(fault_in_size(recipe.ranks, 1));
  const std::string who = std::string(name_of(recipe.collective)) + " by " + recipe.algorithm;
  if (!rooted(recipe.collective) && recipe.root != 0)
    throw ScheduleError(who + " has no root; leave it at 0, not " + std::to_string(recipe.root));
  if (recipe.root < 0 || recipe.root >= recipe.ranks)
    throw ScheduleError(who + ": root " + std::to_string(recipe.root) + " is not one of the " +
                        std::to_string(recipe.ranks) + " ranks");
}

}  // namespace

const Variant& variant_of(Collective collective, std::string_view algorithm) {
  if (const Variant* found = find(collective, algorithm)) return *found;
  std::string known;
  for (std::string_view each : algorithms(collective))
    known += (known.empty() ? "" : ", ") + std::string(each);
  if (collective == Collective::kAllReduce) known += ", hierarchical(inner,outer)";
  throw ScheduleError(std::string(name_of(collective)) + " has no algorithm '" +
                      std::string(algorithm) + "'; use one of: " + known);
}

Schedule instantiate(const Variant& variant, int ranks, Rank root) {
  Builder out(ranks, variant.chunks(ranks));
  variant.emit(out, root);
  if (variant.gather != nullptr) variant.gather(out, root);
  return std::move(out).build(variant.collective, std::string(variant.algorithm), root);
}

Schedule generate(const Recipe& recipe) {
  require_sound(recipe);
  if (recipe.collective == Collective::kAllReduce)
    if (const auto pair = hierarchical_pair(recipe.algorithm))
      return hierarchical(recipe, pair->inner, pair->outer);
  return instantiate(variant_of(recipe.collective, recipe.algorithm), recipe.ranks, recipe.root);
}

std::vector<std::string_view> algorithms(Collective collective) {
  std::vector<std::string_view> names;
  for (const auto family : kFamilies)
    for (const Variant& variant : family())
      if (variant.collective == collective) names.push_back(variant.algorithm);
  return names;
}

std::optional<ScheduleShape> closed_form(const Recipe& recipe) {
  const Variant* variant = find(recipe.collective, recipe.algorithm);
  if (variant == nullptr) return std::nullopt;
  return variant->closed_form(recipe.ranks);
}

}  // namespace gradwire::schedule
