#include "gradwire/base/op.h"

#include <numeric>

#include "gradwire/base/error.h"

namespace gradwire {

Fnv1a& Fnv1a::bytes(const void* data, std::size_t size) noexcept {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < size; ++i) state_ = (state_ ^ p[i]) * 0x100000001b3ULL;
  return *this;
}

std::uint32_t OpSpec::fingerprint() const {
  Fnv1a hash;
  hash.number(static_cast<std::uint64_t>(collective))
      .number(static_cast<std::uint64_t>(dtype))
      .number(static_cast<std::uint64_t>(op))
      .number(static_cast<std::uint64_t>(root))
      .number(counts.size());
  for (std::uint64_t count : counts) hash.number(count);
  hash.text(algorithm).number(schedule_digest).text(codec).number(model);
  if (!moved.empty()) hash.text(moved);
  const std::uint64_t digest = hash.digest();
  return static_cast<std::uint32_t>(digest ^ (digest >> 32));
}

namespace {

constexpr std::size_t kMostCountsShown = 8;

// Returns "1000" or "4, 6"; for many counts, their sum and a digest, so that different counts look
// different.
std::string text_of(const std::vector<std::uint64_t>& counts) {
  std::string text;
  Fnv1a hash;
  for (std::uint64_t count : counts) {
    text += (text.empty() ? "" : ", ") + std::to_string(count);
    hash.number(count);
  }
  if (counts.size() <= kMostCountsShown) return text;
  const auto total = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  return str_cat(total, " in ", counts.size(), " parts #", hash.digest() % 10000);
}

}  // namespace

std::string OpSpec::to_string() const {
  std::string text = std::string(name_of(collective)) + "(";
  if (!moved.empty()) text += moved + " as ";
  text += std::string(name_of(dtype)) + "[" + text_of(counts) + "]";
  if (reduces(collective)) text += ", op=" + std::string(name_of(op));
  const bool rooted = collective == Collective::kReduce || collective == Collective::kBroadcast ||
                      collective == Collective::kGather || collective == Collective::kScatter;
  if (rooted) text += ", root=" + std::to_string(root);
  text += ", algorithm=" + algorithm;
  if (schedule_digest != 0) text += " #" + std::to_string(schedule_digest % 10000);
  text += ", codec=" + codec;
  if (model != 0) text += ", by cost model #" + std::to_string(model % 10000);
  return text + ")";
}

}  // namespace gradwire
