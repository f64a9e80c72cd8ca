// Payloads of foreign bytes: what the CPU's codec refuses is NaN, and said so.
#include <algorithm>
#include <limits>
#include <random>

#include "cuda_families.h"
#include "gpu_kernels.h"
#include "gradwire/base/error.h"
#include "gradwire/codec/codec.h"
#include "gradwire/cuda/gpu_codec.h"

namespace gradwire::cuda {
namespace {

Payload draw_bytes(std::size_t n, std::mt19937_64& random) {
  Payload bytes(n);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

class Foreign {
 public:
  Foreign(const Device& on, std::string_view spec, bool small)
      : on_(on),
        codec_(codec::make_codec(spec)),
        gpu_(GpuCodec::make(on.api, *codec_)),
        turns_(small ? 1 : 4) {}

  void check(Row& row) {
    for (int turn = 0; turn < turns_; ++turn) {
      std::vector<Payload> units;
      for (std::size_t how = 0; how < kHows; ++how) units.push_back(altered(how));
      for (const bool add : {false, true}) expect_decoded(units, add, row);
    }
  }

 private:
  static constexpr std::size_t kHows = 8;

  struct Decoded {
    Floats y;
    std::uint32_t flags;
  };

  std::size_t unit() const { return codec_->block(); }

  Payload encoded() {
    const Floats x = draw(kFamilies[random_() % std::size(kFamilies)], unit(), random_);
    Payload out(codec_->max_bytes(unit()));
    out.resize(codec_->encode(x.data(), x.size(), {}, out));
    return out;
  }
  // In a slot, whose other bytes are any: none of them, or too few, or others.
  Payload altered(std::size_t how) {
    Payload bytes = encoded();
    if (how == 1) bytes.pop_back();
    if (how == 2) bytes.clear();
    if (how == 3) bytes = draw_bytes(bytes.size(), random_);
    for (; how > 3; --how)
      bytes[random_() % (how % 2 == 0 ? bytes.size() : std::min<std::size_t>(12, bytes.size()))] =
          static_cast<std::byte>(random_());
    const Payload behind = draw_bytes(gpu_->slot_bytes(), random_);
    bytes.insert(bytes.end(), behind.begin(), behind.end());
    bytes.resize(gpu_->slot_bytes());
    return bytes;
  }

  Decoded on_cpu(const Payload& bytes, Floats y, bool add) const {
    try {
      const auto found = add ? codec_->decode_add(bytes, y.data(), y.size())
                             : codec_->decode(bytes, y.data(), y.size());
      return {y, found.finite ? 0U : kNotFinite};
    } catch (const InvalidArgument&) {
    }
    return {Floats(y.size(), std::numeric_limits<float>::quiet_NaN()), kRefused};
  }

  Decoded on_gpu(const Payload& all, const Floats& before, bool add, Row& row) const {
    const DeviceArray<std::byte> bytes(on_, all);
    const DeviceArray<float> y(on_, before, 1);
    const DeviceArray<std::uint32_t> flags(on_, {0});
    gpu_->decode(bytes.data(), y.data(), before.size(), add, flags.data(), on_.stream);
    bool intact = true;
    Decoded found{y.values(intact), flags.values(intact)[0]};
    row.expect(intact, "written beyond an array");
    return found;
  }

  void expect_decoded(const std::vector<Payload>& units, bool add, Row& row) {
    const Floats before = draw(kFamilies[0], units.size() * unit(), random_);
    Payload all(gpu_->layout(before.size()).table_bytes());
    Decoded expected{{}, 0};
    for (const Payload& each : units) {
      all.insert(all.end(), each.begin(), each.end());
      const auto here = before.begin() + static_cast<std::ptrdiff_t>(expected.y.size());
      const Decoded one =
          on_cpu(each, Floats(here, here + static_cast<std::ptrdiff_t>(unit())), add);
      expected.y.insert(expected.y.end(), one.y.begin(), one.y.end());
      expected.flags |= one.flags;
    }
    const Decoded found = on_gpu(all, before, add, row);
    const bool sparse = codec_->definition().kind != codec::Definition::Kind::kOneBit;
    if (add && sparse)
      row.expect_same(with_one_nan(found.y), with_one_nan(expected.y), "altered payloads, added");
    else
      row.expect_same(found.y, expected.y, "altered payloads");
    // What is refused may be found not to be finite as well.
    const std::uint32_t asked = (expected.flags & kRefused) != 0 ? expected.flags : ~0U;
    row.expect((found.flags & asked) == expected.flags, "altered payloads: flags");
  }

  const Device& on_;
  std::shared_ptr<const codec::Codec> codec_;
  std::unique_ptr<const GpuCodec> gpu_;
  int turns_;
  std::mt19937_64 random_{19};
};

// A scale that no encoder writes.
void check_scale(const Device& on, Row& row) {
  const auto codec = codec::make_codec("int8:block=96");
  const std::size_t n = 200;
  std::mt19937_64 random(7);
  const Floats x = draw(kFamilies[0], n, random);
  Payload payload(codec->max_bytes(n));
  payload.resize(codec->encode(x.data(), n, {}, payload));
  const float scale = -1;
  std::memcpy(payload.data(), &scale, sizeof scale);
  Floats expected(n);
  row.expect(!codec->decode(payload, expected.data(), n).finite, "the CPU takes the scale");
  const DeviceArray<std::byte> in(on, payload);
  const DeviceArray<float> y(on, x);
  const DeviceArray<std::uint32_t> flags(on, {0});
  GpuCodec::make(on.api, *codec)
      ->decode(in.data(), y.data(), n, /*add=*/false, flags.data(), on.stream);
  bool intact = true;
  row.expect_same(y.values(intact), expected, "a scale below 0");
  row.expect(flags.values(intact)[0] == kNotFinite, "a scale below 0: flags");
}

}  // namespace

void check_payloads(const Device& on, bool small, const Guarded& guarded) {
  guarded("altered payloads", "int8", [&](Row& row) { check_scale(on, row); });
  for (const char* spec : {"onebit", "onebit:block=4096", "threshold:tau=0.5", "topk"})
    guarded("altered payloads", spec, [&](Row& row) { Foreign(on, spec, small).check(row); });
}

}  // namespace gradwire::cuda
