// Units of payloads put together on the device, and payloads of foreign bytes: what the CPU's codec
// refuses is NaN, and said so.
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

using Sizes = std::vector<std::uint32_t>;
using Offsets = std::vector<std::uint64_t>;

constexpr std::uint64_t kAny = ~std::uint64_t{0};

Sizes draw_sizes(std::size_t units, std::uint32_t most, std::mt19937_64& random) {
  Sizes sizes(units);
  for (auto& each : sizes) each = static_cast<std::uint32_t>(random() % (most + 1));
  return sizes;
}

Payload draw_bytes(std::size_t n, std::mt19937_64& random) {
  Payload bytes(n);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

Offsets sums_of(const Sizes& sizes) {
  Offsets sums(sizes.size() + 1);
  for (std::size_t i = 0; i < sizes.size(); ++i) sums[i + 1] = sums[i] + sizes[i];
  return sums;
}

// ---- Slots -------------------------------------------------------------------------------------

void check_offsets(const Device& on, const Sizes& sizes, std::uint64_t most, std::uint64_t limit,
                   Row& row) {
  const Offsets sums = sums_of(sizes);
  const bool refused =
      sums.back() > limit || std::ranges::any_of(sizes, [&](auto each) { return each > most; });
  const DeviceArray<std::uint32_t> in(on, sizes), flags(on, {0});
  const DeviceArray<std::uint64_t> out(on, Offsets(sums.size(), 99));
  on.run(on.api.offsets(in.data(), sizes.size(), most, limit, out.data(), flags.data(), on.stream),
         "offsets");
  bool intact = true;
  const std::string what = "offsets of " + std::to_string(sizes.size());
  row.expect_same(out.values(intact), refused ? Offsets(sums.size()) : sums, what);
  row.expect(flags.values(intact)[0] == (refused ? kRefused : 0U), what + ": flags");
  row.expect(intact, "written beyond an array");
}

void check_pack(const Device& on, const Sizes& sizes, std::size_t slot, std::mt19937_64& random,
                Row& row) {
  const Offsets sums = sums_of(sizes);
  const Payload bytes = draw_bytes(sizes.size() * slot, random);
  Payload expected;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(i * slot);
    expected.insert(expected.end(), first, first + sizes[i]);
  }
  const DeviceArray<std::byte> slots(on, bytes), out(on, Payload(expected.size()));
  const DeviceArray<std::uint32_t> lengths(on, sizes);
  const DeviceArray<std::uint64_t> offsets(on, Offsets(sums.size(), 99));
  on.run(on.api.pack(slots.data(), slot, lengths.data(), sizes.size(), offsets.data(), out.data(),
                     on.stream),
         "pack");
  bool intact = true;
  row.expect_same(out.values(intact), expected, "slots of " + std::to_string(slot));
  row.expect_same(offsets.values(intact), sums, "their offsets");
  row.expect(intact, "written beyond an array");
}

void check_slots(const Device& on, bool small, Row& row) {
  std::mt19937_64 random(13);
  for (const std::size_t units : {1, 31, 1025, 9000, 70'000}) {
    if (small && units > 2000) break;
    Sizes sizes = draw_sizes(units, 272, random);
    check_offsets(on, sizes, 272, sums_of(sizes).back(), row);
    sizes.front() = 272;
    check_offsets(on, sizes, 272, sums_of(sizes).back() - 1, row);
    sizes[random() % units] = 273;
    check_offsets(on, sizes, 272, kAny, row);
  }
  for (const std::size_t slot : {16, 272, 1024, 1040, 5008})
    for (const std::size_t units : {1, 9, 300})
      if (!small || units == 9)
        check_pack(on, draw_sizes(units, static_cast<std::uint32_t>(slot), random), slot, random,
                   row);
}

// ---- Foreign bytes -----------------------------------------------------------------------------

class Foreign {
 public:
  Foreign(const Device& on, std::string_view spec, bool small)
      : on_(on),
        codec_(codec::make_codec(spec)),
        gpu_(Codec::make(on.api, *codec_)),
        turns_(small ? 1 : 4) {}

  void check(Row& row) {
    for (int turn = 0; turn < turns_; ++turn) {
      std::vector<Payload> units;
      for (std::size_t how = 0; how < kHows; ++how) units.push_back(altered(how));
      for (const bool add : {false, true}) expect_decoded(units, add, row);
    }
    expect_all_refused(row);
  }

 private:
  static constexpr std::size_t kHows = 8;

  struct Decoded {
    Floats y;
    std::uint32_t flags;
  };

  std::size_t unit() const { return codec_->unit(); }

  Payload encoded() {
    const Floats x = draw(kFamilies[random_() % std::size(kFamilies)], unit(), random_);
    Payload out(codec_->max_bytes(unit()));
    out.resize(codec_->encode(x.data(), x.size(), {}, out));
    return out;
  }
  // None, or too few or too many bytes, or others.
  Payload altered(std::size_t how) {
    Payload bytes = encoded();
    if (how == 1) bytes.pop_back();
    if (how == 2) bytes.push_back(std::byte{0});
    if (how == 3) bytes.clear();
    if (how == 4) bytes = draw_bytes(bytes.size(), random_);
    for (; how > 4; --how)
      bytes[random_() % (how % 2 == 0 ? bytes.size() : std::min<std::size_t>(12, bytes.size()))] =
          static_cast<std::byte>(random_());
    return bytes;
  }

  Decoded on_cpu(const Payload& bytes, Floats y, bool add) const {
    try {
      const auto found = add ? codec_->decode_add(bytes, y.data(), y.size())
                             : codec_->decode(bytes, y.data(), y.size());
      if (found.bytes == bytes.size()) return {y, found.finite ? 0U : kNotFinite};
    } catch (const InvalidArgument&) {
    }
    return {Floats(y.size(), std::numeric_limits<float>::quiet_NaN()), kRefused};
  }

  Decoded on_gpu(const Payload& all, const Offsets& offsets, const Floats& before, bool add,
                 Row& row) const {
    const DeviceArray<std::byte> bytes(on_, all);
    const DeviceArray<std::uint64_t> places(on_, offsets);
    const DeviceArray<float> y(on_, before, 1);
    const DeviceArray<std::uint32_t> flags(on_, {0});
    decode({bytes.data(), places.data()}, y.data(), before.size(), add, flags.data());
    bool intact = true;
    Decoded found{y.values(intact), flags.values(intact)[0]};
    row.expect(intact, "written beyond an array");
    return found;
  }

  void decode(const Slots& in, float* y, std::uint64_t n, bool add, std::uint32_t* flags) const {
    const codec::Definition of = codec_->definition();
    if (of.kind == codec::Definition::Kind::kOneBit)
      on_.run(on_.api.onebit_sum(&in, 1, n, of.block, y, add, flags, on_.stream), "onebit_sum");
    else if (of.kind == codec::Definition::Kind::kThreshold)
      on_.run(on_.api.threshold_decode(in, n, y, add, flags, on_.stream), "threshold_decode");
    else
      on_.run(on_.api.topk_decode(in, n, gpu_->slot_bytes(), Values::kFloat32, y, add, flags,
                                  on_.stream),
              "topk_decode");
  }

  void expect_decoded(const std::vector<Payload>& units, bool add, Row& row) {
    const Floats before = draw(kFamilies[0], units.size() * unit(), random_);
    Payload all;
    Offsets offsets = {0};
    Decoded expected{{}, 0};
    for (const Payload& each : units) {
      all.insert(all.end(), each.begin(), each.end());
      const auto here = before.begin() + static_cast<std::ptrdiff_t>(expected.y.size());
      const Decoded one =
          on_cpu(each, Floats(here, here + static_cast<std::ptrdiff_t>(unit())), add);
      expected.y.insert(expected.y.end(), one.y.begin(), one.y.end());
      expected.flags |= one.flags;
      offsets.push_back(all.size());
    }
    const Decoded found = on_gpu(all, offsets, before, add, row);
    const bool sparse = codec_->definition().kind != codec::Definition::Kind::kOneBit;
    if (add && sparse)
      row.expect_same(with_one_nan(found.y), with_one_nan(expected.y), "altered payloads, added");
    else
      row.expect_same(found.y, expected.y, "altered payloads");
    // What is refused may be found not to be finite as well.
    const std::uint32_t asked = (expected.flags & kRefused) != 0 ? expected.flags : ~0U;
    row.expect((found.flags & asked) == expected.flags, "altered payloads: flags");
  }

  // Offsets that are all 0, as of lengths that don't fit.
  void expect_all_refused(Row& row) {
    const std::size_t n = 2 * unit();
    const Decoded found = on_gpu(encoded(), Offsets(3), Floats(n, 1), /*add=*/true, row);
    const Floats nan(n, std::numeric_limits<float>::quiet_NaN());
    row.expect_same(found.y, nan, "refused offsets");
    row.expect((found.flags & kRefused) != 0, "refused offsets: flags");
  }

  const Device& on_;
  std::shared_ptr<const codec::Codec> codec_;
  std::unique_ptr<const Codec> gpu_;
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
  Codec::make(on.api, *codec)
      ->decode(in.data(), y.data(), n, /*add=*/false, flags.data(), on.stream);
  bool intact = true;
  row.expect_same(y.values(intact), expected, "a scale below 0");
  row.expect(flags.values(intact)[0] == kNotFinite, "a scale below 0: flags");
}

}  // namespace

void check_payloads(const Device& on, bool small, const Guarded& guarded) {
  guarded("slots", "all", [&](Row& row) { check_slots(on, small, row); });
  guarded("altered payloads", "int8", [&](Row& row) { check_scale(on, row); });
  for (const char* spec : {"onebit", "onebit:block=4096", "threshold:tau=0.5", "topk"})
    guarded("altered payloads", spec, [&](Row& row) { Foreign(on, spec, small).check(row); });
}

}  // namespace gradwire::cuda
