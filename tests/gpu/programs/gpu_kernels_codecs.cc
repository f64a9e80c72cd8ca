// Codecs on the device beside those of the CPU (codec/codec.h), with error feedback and without.
#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <random>
#include <utility>

#include "cuda_families.h"
#include "gpu_kernels.h"
#include "gradwire/base/types.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/cuda/gpu_codec.h"

namespace gradwire::cuda {
namespace {

constexpr std::uint64_t kCall = 77, kCalls = 5;  // of Rounding
constexpr float kFactor = 1.0F / 3;

// What a call gives on either side.
struct Outcome {
  Payload payload;
  Floats error;                   // with feedback
  codec::CodecState codec_state;  // where the codec adapts
  Floats decoded, added;          // y := , y +=
  Floats summed, finished;        // of three payloads; the owner's stage
  std::uint32_t flags = 0;        // of both decodings
};

// A call: x, what was not sent before (empty: no feedback), and what decodings find.
struct Inputs {
  Floats x, residual, other, before;
  codec::CodecState codec_state;
};

Payload encode(const codec::Codec& codec, const Floats& x,
               const codec::EncodeContext& span_feedback) {
  Payload out(codec.max_bytes(x.size()));
  out.resize(codec.encode(x.data(), x.size(), span_feedback, out));
  return out;
}

// Without a key: a codec that adapts chooses for each unit by itself, as the device does.
Payload encode_by_units(const codec::Codec& codec, const Floats& x) {
  const std::size_t unit = codec.fixed_size() ? x.size() : codec.block();
  Payload all;
  for (std::size_t i = 0; i < x.size(); i += unit) {
    const std::size_t n = std::min(unit, x.size() - i);
    Payload out(codec.max_bytes(n));
    out.resize(codec.encode(x.data() + i, n, {.call = kCall, .element = i}, out));
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

Outcome on_cpu(const codec::Codec& codec, const Inputs& of, bool adapts) {
  const std::size_t n = of.x.size();
  const bool feedback = !of.residual.empty();
  Outcome made;
  made.error.resize(feedback ? n : 0);
  made.codec_state = {.tau = of.codec_state.tau};
  codec::EncodeContext span_feedback{.call = feedback ? kCall ^ kCalls : kCall,
                                     .residual = feedback ? of.residual.data() : nullptr,
                                     .error = feedback ? made.error.data() : nullptr,
                                     .codec_state = adapts ? &made.codec_state : nullptr};
  if (adapts) codec.prepare(of.x.data(), n, span_feedback);
  made.payload = encode(codec, of.x, span_feedback);
  if (adapts) codec.adapt(n, made.codec_state);
  made.decoded = made.added = of.before;
  bool finite = codec.decode(made.payload, made.decoded.data(), n).finite;
  finite = codec.decode_add(made.payload, made.added.data(), n).finite && finite;
  made.flags = finite ? 0U : std::uint32_t{kNotFinite};
  const Payload other = encode_by_units(codec, of.other);
  made.summed = of.before;
  const std::array<ConstBytes, 3> payloads = {made.payload, other, made.payload};
  codec.decode_sum(payloads, made.summed.data(), n);
  made.finished = made.decoded;
  codec::kernels().scale[static_cast<std::size_t>(DType::kFloat32)](
      made.finished.data(), static_cast<double>(kFactor), n);
  return made;
}

// A key on the device.
class Key {
 public:
  Key(const Device& on, std::size_t n, std::size_t shift)
      : old_(on, Floats(n), shift), next_(on, Floats(n), shift), key_state_(on, {GpuKeyState{}}) {}

  // Its call `which ^ 1` is under way.
  SpanFeedback begin(const Inputs& of, std::uint32_t which) const {
    GpuKeyState now{which, which, kCalls, {}};
    now.codec_state[which ^ 1U].tau = of.codec_state.tau;
    key_state_.set({now});
    SpanFeedback span_feedback{{nullptr, nullptr}, key_state_.data()};
    if (of.residual.empty()) return span_feedback;
    old_.set(of.residual);
    next_.set(Floats(of.residual.size(), -7));
    span_feedback.residual[which] = old_.data();
    span_feedback.residual[which ^ 1U] = next_.data();
    return span_feedback;
  }
  Floats before(bool& intact) const { return old_.values(intact); }
  Floats after(bool& intact) const { return next_.values(intact); }
  GpuCodecState codec_state(bool& intact) const {
    const GpuKeyState now = key_state_.values(intact)[0];
    return now.codec_state[now.which ^ 1U];
  }

 private:
  DeviceArray<float> old_, next_;
  DeviceArray<GpuKeyState> key_state_;
};

// The bytes that count, as the CPU writes them.
Payload packed(const Payload& whole, const GpuCodec& codec, std::size_t n, std::size_t most) {
  const Slotted layout = codec.layout(n);
  if (layout.units == 0) return {whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(most)};
  Payload out;
  for (std::uint64_t unit = 0; unit < layout.units; ++unit) {
    std::uint32_t size = 0;
    std::memcpy(&size, whole.data() + unit * sizeof size, sizeof size);
    const std::byte* slot = whole.data() + layout.table_bytes() + unit * layout.slot_bytes;
    out.insert(out.end(), slot, slot + std::min<std::size_t>(size, layout.slot_bytes));
  }
  return out;
}

class OnGpu {
 public:
  OnGpu(const Device& on, const codec::Codec& cpu, std::size_t n, std::size_t shift)
      : on_(on),
        cpu_(cpu),
        codec_(GpuCodec::make(on.api, cpu)),
        n_(n),
        scratch_(on, Payload(codec_->scratch_bytes(n) + 1)),
        key_(on, n, shift),
        x_(on, Floats(n), shift),
        y_(on, Floats(n), shift),
        other_(on, Floats(n)),
        flags_(on, {0}),
        payload_(on, empty()),
        second_(on, empty()),
        three_(on, Payload(3 * codec_->payload_bytes(n_))) {}

  bool adapts() const { return codec_->adapts(); }

  Outcome call(const Inputs& of, std::uint32_t which, Row& row) const {
    Outcome made;
    bool intact = true;
    x_.set(of.x);
    other_.set(of.other);
    payload_.set(empty());
    second_.set(empty());
    const GpuSpan run = span_of(x_.data(), key_.begin(of, which));
    codec_->prepare(run, scratch_.data(), on_.stream);
    codec_->encode(run, payload_.data(), scratch_.data(), on_.stream);
    codec_->adapt(n_, run.span_feedback.key_state, on_.stream);
    made.payload = packed(payload_.values(intact), *codec_, n_, cpu_.max_bytes(n_));
    if (!of.residual.empty()) made.error = key_.after(intact);
    const GpuCodecState found = key_.codec_state(intact);
    made.codec_state = {found.tau, 0, found.sent, std::bit_cast<float>(found.largest)};
    codec_->encode(span_of(other_.data(), {}), second_.data(), scratch_.data(), on_.stream);
    decode(of, made, intact);
    row.expect_same(x_.values(intact), of.x, "the input");
    if (!of.residual.empty()) row.expect_same(key_.before(intact), of.residual, "the residual");
    made.finished = finish(of, which, made, row, intact);
    row.expect(intact, "written beyond an array");
    return made;
  }

 private:
  Payload empty() const { return Payload(codec_->payload_bytes(n_), std::byte{0xEE}); }
  GpuSpan span_of(const float* x, const SpanFeedback& span_feedback) const {
    GpuSpan run;
    run.x = x;
    run.n = n_;
    run.span_feedback = span_feedback;
    run.call = kCall;
    return run;
  }
  void decode(const Inputs& of, Outcome& made, bool& intact) const {
    const auto found = [&](const auto& decoding) {
      y_.set(of.before);
      decoding();
      return y_.values(intact);
    };
    flags_.set({0});
    for (const bool add : {false, true})
      (add ? made.added : made.decoded) = found(
          [&] { codec_->decode(payload_.data(), y_.data(), n_, add, flags_.data(), on_.stream); });
    made.flags = flags_.values(intact)[0];
    const std::size_t bytes = codec_->payload_bytes(n_);
    std::byte* at = three_.data();
    for (const auto* each : {&payload_, &second_, &payload_}) {
      on_.copy(at, each->data(), bytes, CopyKind::kOnDevice);
      at += bytes;
    }
    const GpuSpan run{.y = y_.data(), .n = n_};
    made.summed = found([&] {
      codec_->decode({&run, 1}, {.payloads = {three_.data(), static_cast<std::int64_t>(bytes), 3}},
                     nullptr, on_.stream);
    });
  }
  // Of the same call once more, where nothing was adapted yet; y takes x's place.
  Floats finish(const Inputs& of, std::uint32_t which, const Outcome& made, Row& row,
                bool& intact) const {
    y_.set(of.x);
    payload_.set(empty());
    GpuSpan run = span_of(y_.data(), key_.begin(of, which));
    run.y = y_.data();
    codec_->prepare(run, scratch_.data(), on_.stream);
    codec_->encode({&run, 1}, {.out = payload_.data(), .finishes = true, .factor = kFactor},
                   scratch_.data(), nullptr, on_.stream);
    row.expect_same(packed(payload_.values(intact), *codec_, n_, cpu_.max_bytes(n_)), made.payload,
                    "the owner's payload");
    if (!of.residual.empty())
      row.expect_same(key_.after(intact), made.error, "the owner's residual");
    return y_.values(intact);
  }

  const Device& on_;
  const codec::Codec& cpu_;
  std::unique_ptr<const GpuCodec> codec_;
  std::size_t n_;
  DeviceArray<std::byte> scratch_;
  Key key_;
  DeviceArray<float> x_, y_, other_;
  DeviceArray<std::uint32_t> flags_;
  DeviceArray<std::byte> payload_, second_, three_;
};

bool is_sparse(const codec::Codec& codec) {
  return codec.definition().kind == codec::Definition::Kind::kThreshold ||
         codec.definition().kind == codec::Definition::Kind::kTopK;
}

void compare(Outcome gpu, Outcome cpu, const codec::Codec& codec, bool adapts,
             const std::string& what, Row& row) {
  if (is_sparse(codec))
    for (Floats* each : {&gpu.added, &cpu.added, &gpu.summed, &cpu.summed})
      *each = with_one_nan(std::move(*each));
  row.expect_same(gpu.payload, cpu.payload, what + ": payload");
  row.expect_same(gpu.error, cpu.error, what + ": residual");
  row.expect_same(gpu.decoded, cpu.decoded, what + ": decoded");
  row.expect_same(gpu.added, cpu.added, what + ": decoded and added");
  row.expect_same(gpu.summed, cpu.summed, what + ": sum of three");
  row.expect_same(gpu.finished, cpu.finished, what + ": owner's result");
  row.expect((gpu.flags & kNotFinite) == cpu.flags, what + ": flags");
  if (!adapts) return;
  row.expect(gpu.codec_state.sent == cpu.codec_state.sent, what + ": elements sent");
  row.expect(std::bit_cast<std::uint32_t>(gpu.codec_state.tau) ==
                 std::bit_cast<std::uint32_t>(cpu.codec_state.tau),
             what + ": tau");
}

}  // namespace

std::vector<std::string_view> codec_specs(bool small) {
  std::vector<std::string_view> specs = {"fp16",
                                         "fp16:scale=1024",
                                         "bf16",
                                         "int8",
                                         "int8:block=96,rounding=stochastic,seed=5",
                                         "int4",
                                         "int4:block=64,rounding=stochastic,seed=5",
                                         "onebit",
                                         "onebit:block=64",
                                         "onebit:block=2048",
                                         "threshold",
                                         "threshold:density=0.1",
                                         "threshold:tau=0.5",
                                         "topk",
                                         "topk:density=0.3,values=fp16",
                                         "topk:density=0.05,values=bf16"};
  if (!small)
    specs.insert(specs.end(), {"onebit:block=4096", "int8:block=4096", "int8:block=20000"});
  return specs;
}

std::vector<std::size_t> codec_lengths(std::string_view spec, bool small) {
  if (!small) return {1, 31, 1023, 1024, 1025, 32768, 32801, 100'003, 1'000'014};
  if (spec == "onebit:block=2048") return {4103};  // two blocks of several warps, and some
  return {31, 1025};
}

// Of an even n beyond 1,025 every second family, of an odd one the others; of long arrays once, of
// others aligned and not, with feedback and without.
void check_codec(const Device& on, std::string_view spec, std::size_t n, bool small, Row& row) {
  const auto codec = codec::make_codec(spec);
  const bool long_one = n > 50'000;
  std::mt19937_64 random(n);
  const Floats residual = draw(kFamilies[0], n, random), other = draw(kFamilies[0], n, random),
               before = draw(kFamilies[0], n, random);
  const OnGpu aligned(on, *codec, n, 0), unaligned(on, *codec, n, 1);
  std::uint32_t turn = 0;
  const std::size_t step = small ? 4 : n > 1025 ? 2 : 1;
  for (std::size_t kind = step == 2 ? n % 2 : 0; kind < std::size(kFamilies); kind += step) {
    const Family& family = kFamilies[kind];
    for (int variant = 0; variant < (small || long_one ? 1 : 4); ++variant, ++turn) {
      const bool feedback = (turn & 1U) == 0;
      const bool shifted = (turn >> 1 & 1U) != 0;
      Inputs of{draw(family, n, random), feedback ? residual : Floats(), other, before, {}};
      const OnGpu& gpu = shifted ? unaligned : aligned;
      const std::string what = std::string(family.name) + (feedback ? ", with feedback" : "") +
                               (shifted ? ", unaligned" : "");
      for (std::uint32_t call = 0; call < 2; ++call) {
        const Outcome cpu = on_cpu(*codec, of, gpu.adapts());
        compare(gpu.call(of, call, row), cpu, *codec, gpu.adapts(), what, row);
        if (!feedback || long_one) break;
        of.residual = cpu.error;  // the second call goes on with what the first one left
        of.codec_state = cpu.codec_state;
      }
    }
  }
}

}  // namespace gradwire::cuda
