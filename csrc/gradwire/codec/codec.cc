#include "gradwire/codec/codec.h"

#include <algorithm>
#include <limits>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/codec/spec.h"

// A new codec joins this list; its file defines the factory make_NAME.
#define GRADWIRE_CODECS(each)                                                                    \
  each(none) each(fp16) each(bf16) each(int8) each(int4) each(onebit) each(threshold) each(topk) \
      each(lowrank) each(lossless)

namespace gradwire::codec {

#define GRADWIRE_DECLARE(name) CodecFactory make_##name;
GRADWIRE_CODECS(GRADWIRE_DECLARE)
#undef GRADWIRE_DECLARE

namespace {

struct NamedFactory {
  std::string_view name;
  CodecFactory* make;
};

constexpr std::string_view kBetweenSites = ":between=sites";  // first in a canonical name

constexpr NamedFactory kCodecs[] = {
#define GRADWIRE_ENTRY(name) NamedFactory{#name, make_##name},
    GRADWIRE_CODECS(GRADWIRE_ENTRY)
#undef GRADWIRE_ENTRY
};

}  // namespace

bool Codec::between_sites() const noexcept {
  return name().find(kBetweenSites) != std::string::npos;
}

void Codec::prepare(const float*, std::size_t, const EncodeContext&) const {}
void Codec::adapt(std::size_t, CodecState&) const {}

std::size_t Codec::encode(const float* x, std::size_t n, const EncodeContext& context,
                          Bytes out) const {
  check_room(*this, out.size(), max_bytes(n), n);
  return write(x, n, context, out.data());
}

Decoded Codec::decode_sum(std::span<const ConstBytes> payloads, float* y, std::size_t n) const {
  Decoded all;
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    const Decoded one = i == 0 ? decode(payloads[i], y, n) : decode_add(payloads[i], y, n);
    if (one.bytes != payloads[i].size())
      throw InvalidArgument("codec '" + name() + "': payload " + std::to_string(i) +
                            " is longer than its elements");
    if (i == 0) all.bytes = one.bytes;
    all.finite = all.finite && one.finite;
  }
  return all;
}

bool mark_not_finite(const Codec& codec, float* y, std::size_t n) noexcept {
  const auto finite = kernels().finite;
  if (finite(y, n)) return true;
  const std::size_t block = codec.block();
  for (std::size_t i = 0; block > 1 && i < n; i += block) {
    const std::size_t length = std::min(block, n - i);
    if (!finite(y + i, length)) std::fill_n(y + i, length, std::numeric_limits<float>::quiet_NaN());
  }
  return false;
}

std::shared_ptr<const Codec> make_codec(std::string_view spec) {
  const std::string_view name = spec.substr(0, spec.find(':'));
  const std::string_view rest = spec.substr(std::min(spec.size(), name.size() + 1));
  std::string known;
  for (const NamedFactory& entry : kCodecs) {
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
    if (entry.name != name) continue;
    Parameters parameters(name, rest);
    const bool between_sites = rest.find("between=") != std::string_view::npos &&
                               parameters.choice("between", {"ranks", "sites"}) == "sites";
    auto codec = entry.make(parameters);
    parameters.finish();
    if (between_sites && codec->combine() != Combine::kReencode)
      parameters.refuse("between", "sites", "for codecs that encode sums anew, such as int8");
    return codec;
  }
  throw InvalidArgument("unknown codec '" + std::string(name) + "'; use one of: " + known);
}

std::vector<std::string_view> codec_names() {
  std::vector<std::string_view> names;
  for (const NamedFactory& entry : kCodecs) names.push_back(entry.name);
  return names;
}

}  // namespace gradwire::codec
