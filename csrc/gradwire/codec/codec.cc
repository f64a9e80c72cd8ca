#include "gradwire/codec/codec.h"

#include <algorithm>
#include <array>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd.h"
#include "gradwire/codec/spec.h"

namespace gradwire::codec {
namespace {

struct Entry {
  std::string_view name;
  Maker* make;
};

constexpr std::array kCodecs = {
    Entry{"none", make_none},
    Entry{"fp16", make_fp16},
    Entry{"bf16", make_bf16},
};

}  // namespace

std::size_t Codec::fold_encode(ConstBytes in, const float* x, std::size_t n, Position at,
                               float* error, float* scratch, Bytes out) const {
  decode(in, scratch, n);
  const auto& sum = kernels().reduce[static_cast<std::size_t>(DType::kFloat32)];
  sum[static_cast<std::size_t>(ReduceOp::kSum)](scratch, x, n);
  return encode(scratch, n, at, error, out);
}

std::shared_ptr<const Codec> make_codec(std::string_view spec) {
  const std::string_view name = spec.substr(0, spec.find(':'));
  const std::string_view rest = spec.substr(std::min(spec.size(), name.size() + 1));
  std::string known;
  for (const Entry& entry : kCodecs) {
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
    if (entry.name != name) continue;
    Parameters parameters(name, rest);
    auto codec = entry.make(parameters);
    parameters.finish();
    return codec;
  }
  throw InvalidArgument("unknown codec '" + std::string(name) + "'; use one of: " + known);
}

std::vector<std::string_view> codec_names() {
  std::vector<std::string_view> names;
  for (const Entry& entry : kCodecs) names.push_back(entry.name);
  return names;
}

}  // namespace gradwire::codec
