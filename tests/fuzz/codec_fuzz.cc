// A codec's spec, and payloads that its decoder did not write.
//   input: the spec, a newline, 3 bytes number of elements (modulo 70,000), the payload
#include <algorithm>
#include <cmath>
#include <string>

#include "fuzz.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/simd.h"

namespace gradwire::fuzz {
namespace {

using codec::Codec;

constexpr std::size_t kMostElements = 70000;  // more than two units of any codec

// In memory of its very own size, so that one byte too far is seen.
void decode(const Codec& codec, ConstBytes payload, std::size_t n) {
  const std::vector<std::byte> in(payload.begin(), payload.end());
  std::vector<float> y(n);
  try {
    require(codec.decode(in, y.data(), n).bytes <= in.size());
    require(codec.decode_add(in, y.data(), n).bytes <= in.size());
    const ConstBytes both[] = {in, in};
    require(codec.decode_sum(both, y.data(), n).bytes == in.size());
  } catch (const InvalidArgument&) {
  }
}

// What it encodes, it decodes, whatever the values are; finite ones stay finite.
void encode(const Codec& codec, ConstBytes payload) {
  std::vector<float> x(payload.size() / sizeof(float));
  if (!x.empty()) std::memcpy(x.data(), payload.data(), x.size() * sizeof(float));
  std::vector<std::byte> out(codec.max_bytes(x.size()));
  std::vector<float> error(x.size()), y(x.size());
  codec::EncodeContext context;
  context.error = error.data();
  const std::size_t size = codec.encode(x.data(), x.size(), context, out);
  require(size <= out.size());
  out.resize(size);
  const codec::Decoded decoded = codec.decode(out, y.data(), y.size());
  require(decoded.bytes == size);
  const auto finite = [](const std::vector<float>& values) {
    return std::all_of(values.begin(), values.end(),
                       [](float each) { return std::isfinite(each); });
  };
  require(decoded.finite == finite(x));
  require(decoded.finite == finite(y));
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  const auto* end = std::find(data, data + size, '\n');
  const std::string spec(data, end);
  if (end == data + size) return 0;
  Input input(end + 1, static_cast<std::size_t>(data + size - end - 1));
  try {
    const auto codec = gradwire::codec::make_codec(spec);
    require(gradwire::codec::make_codec(codec->name())->name() == codec->name());
    const gradwire::codec::FloatEnvironment environment;
    const std::size_t low = input.number<std::uint16_t>(), high = input.number<std::uint8_t>();
    const std::size_t n = (high << 16 | low) % kMostElements;
    const gradwire::ConstBytes payload = input.rest();
    decode(*codec, payload, n);
    encode(*codec, payload);
  } catch (const gradwire::InvalidArgument&) {
  }
  return 0;
}
