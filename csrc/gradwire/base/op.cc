#include "gradwire/base/op.h"

#include <numeric>

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
  hash.text(algorithm).number(schedule_digest).text(codec);
  const std::uint64_t digest = hash.digest();
  return static_cast<std::uint32_t>(digest ^ (digest >> 32));
}

std::string OpSpec::to_string() const {
  const auto total = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  std::string text = std::string(name_of(collective)) + "(" + std::string(name_of(dtype)) + "[" +
                     std::to_string(total) + "]";
  if (counts.size() > 1) text += " in " + std::to_string(counts.size()) + " parts";
  if (reduces(collective)) text += ", op=" + std::string(name_of(op));
  const bool rooted = collective == Collective::kReduce || collective == Collective::kBroadcast ||
                      collective == Collective::kGather || collective == Collective::kScatter;
  if (rooted) text += ", root=" + std::to_string(root);
  return text + ", algorithm=" + algorithm + ", codec=" + codec + ")";
}

}  // namespace gradwire
