#include "gradwire/schedule/simulated_links.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace gradwire::schedule {

namespace {

constexpr std::size_t kOfRanks = 0, kOfHosts = 1, kOfLevels = 2;  // tiers
constexpr std::size_t kNone = ~std::size_t{0};

// CRC-32 as zlib and Ethernet have it: its low bits differ where few bits of the text do.
std::uint32_t crc32(const std::string& text) {
  std::uint32_t crc = ~0U;
  for (char each : text) {
    crc ^= static_cast<unsigned char>(each);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0xEDB88320U : 0U);
  }
  return ~crc;
}

}  // namespace

SimulatedLinks::SimulatedLinks(const CostModel& model, const Workload& work, int ranks)
    : model_(model), work_(work) {
  const auto& hosts = work.host_of;
  const int most = hosts.empty() ? 0 : *std::max_element(hosts.begin(), hosts.end());
  add_tier(at(ranks), model.within, 0);
  add_tier(at(most) + 1, model.between, at(host(0)));
  for (const Level& level : work.network.levels) {
    LinkCost cost;
    cost.beta = level.beta * level.uplinks;
    cost.latency = level.latency;
    int groups = 0;
    for (Rank rank = 0; rank < ranks; ++rank) groups = std::max(groups, level.group(rank) + 1);
    add_tier(at(groups) * at(level.uplinks), cost, kNone);
  }
}

void SimulatedLinks::add_tier(std::size_t count, const LinkCost& cost, std::size_t slow) {
  Tier tier;
  tier.out.assign(count, {cost.beta, cost.latency, cost.burst, 0});
  tier.in.assign(count, {cost.beta, 0, cost.burst, cost.mixed});
  if (slow != kNone)
    for (auto* side : {&tier.out, &tier.in}) (*side)[slow].beta *= work_.network.slow;
  tiers_.push_back(std::move(tier));
}

// Returns how many groups a message leaves. Groups lie in each other.
int SimulatedLinks::crossed(Rank src, Rank dst) const {
  int count = 1;
  if (together(src, dst)) return count;
  for (std::size_t level = 0; level < work_.network.levels.size(); ++level, ++count)
    if (group(level, src) == group(level, dst)) break;
  return count;
}

SimulatedLinks::Direction& SimulatedLinks::link(Rank src, Rank dst, int hop) {
  const int half = crossed(src, dst);
  const bool leaves = hop < half;
  const std::size_t above = at(leaves ? hop : 2 * half - 1 - hop);
  const std::size_t tier = together(src, dst) ? kOfRanks : kOfHosts + above;
  Tier& found = tiers_[tier];
  return (leaves ? found.out : found.in)[number(tier, leaves ? src : dst, src, dst)];
}

std::size_t SimulatedLinks::number(std::size_t tier, Rank rank, Rank src, Rank dst) const {
  if (tier == kOfRanks) return at(rank);
  if (tier == kOfHosts) return at(host(rank));
  const Level& level = work_.network.levels[tier - kOfLevels];
  const std::size_t first = group(tier - kOfLevels, rank) * at(level.uplinks);
  if (level.uplinks == 1) return first;
  // By a hash of both hosts, as switches choose among equal ways (RFC 2992).
  const std::string hosts = std::to_string(host(src)) + ' ' + std::to_string(host(dst));
  return first + crc32(hosts) % at(level.uplinks);
}

double SimulatedLinks::pass(Rank src, Rank dst, int hop, double bytes, double time,
                            double& last_bit) {
  Direction& its = link(src, dst, hop);
  const double mixed = its.last == -1 || its.last == src ? 0 : its.mixed;
  its.last = src;
  const double start = std::max(time, its.free);
  its.free = std::max(its.free, time - its.burst * its.beta) + bytes * (its.beta + mixed);
  if (hop + 1 == hops(src, dst)) return std::max({time, its.free, last_bit});
  last_bit = std::max(last_bit, its.free) + its.latency;
  return start + its.latency;
}

void SimulatedLinks::carry(Rank src, Rank dst, double bytes) {
  for (int hop = 0; hop < hops(src, dst); ++hop) {
    Direction& its = link(src, dst, hop);
    its.free += its.beta * bytes;
  }
}

double SimulatedLinks::most() const {
  double found = 0;
  for (const Tier& tier : tiers_)
    for (const auto* side : {&tier.out, &tier.in})
      for (const Direction& each : *side) found = std::max(found, each.free);
  return found;
}

}  // namespace gradwire::schedule
