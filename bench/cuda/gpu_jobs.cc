// The work of kernels, for speed.py to time beside torch's: a library, through which it
// enqueues a job on a stream of torch's, with arrays of its own, of which there are several sets,
// so that none is still in a cache when its turn comes.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "gpu_device.h"
#include "gradwire/base/types.h"
#include "gradwire/codec/codec.h"
#include "gradwire/cuda/gpu_codec.h"

namespace gradwire::cuda {
namespace {

constexpr int kPayloads = 8;  // of what sums them
constexpr std::uint64_t kRank = 4, kDrawn = 1 << 20;
constexpr float kSmall = 0.1F;  // residuals, beside gradients of 1

// One set of arrays. What a job doesn't use has no memory.
struct Arrays {
  explicit Arrays(const Api& api)
      : rooms{Room(api), Room(api), Room(api), Room(api), Room(api), Room(api), Room(api)} {}
  float* x = nullptr;
  float* y = nullptr;
  SpanFeedback span_feedback{};
  std::byte* scratch = nullptr;
  std::array<std::byte*, kPayloads> payloads{};
  std::array<Room, 7> rooms;
};

class Job;
using Work = std::function<void(const Job&, Arrays&, Stream)>;

class Job {
 public:
  Job(const Api& api, std::string_view name, std::uint64_t n, int sets);
  ~Job() { await_device(api()); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  const Api& api() const { return on_.api; }
  std::uint64_t n() const { return n_; }
  const GpuCodec& codec() const { return *codec_; }
  GpuSpan span_of(const Arrays& of) const {
    GpuSpan run;
    run.x = of.x;
    run.y = of.y;
    run.n = n_;
    run.span_feedback = of.span_feedback;
    return run;
  }
  void run(int set, Stream stream) {
    work_(*this, *sets_.at(static_cast<std::size_t>(set)), stream);
  }

 private:
  float* floats(Room& room, float scale) const;
  void make(Arrays& of, bool feedback, int payloads) const;

  const Device on_;
  const std::uint64_t n_;
  std::unique_ptr<const GpuCodec> codec_;
  Work work_;
  std::vector<std::unique_ptr<Arrays>> sets_;
};

// ---- What there is -----------------------------------------------------------------------------

void encode(const Job& job, Arrays& of, Stream stream) {
  job.codec().encode(job.span_of(of), of.payloads[0], of.scratch, stream);
}

void decode_add(const Job& job, Arrays& of, Stream stream) {
  job.codec().decode(of.payloads[0], of.y, job.n(), /*add=*/true, nullptr, stream);
}

void decode(const Job& job, Arrays& of, Stream stream) {
  job.codec().decode(of.payloads[0], of.y, job.n(), /*add=*/false, nullptr, stream);
}

// A round of a ring: what has arrived is added, and the sum encoded for the next rank.
void round(const Job& job, Arrays& of, Stream stream) {
  GpuSpan run = job.span_of(of);
  run.x = of.y;
  Encoding how;
  how.received = {of.payloads[0], 0, 1};
  how.out = of.payloads[1];
  job.codec().encode({&run, 1}, how, of.scratch, nullptr, stream);
}

void sum(const Job& job, Arrays& of, Stream stream) {
  const GpuSpan run = job.span_of(of);
  const std::int64_t stride = of.payloads[1] - of.payloads[0];
  job.codec().decode({&run, 1}, {.payloads = {of.payloads[0], stride, kPayloads}}, nullptr, stream);
}

// The owner's stage of `direct`: all other ranks' payloads are added, in turn, and the sum encoded.
void own(const Job& job, Arrays& of, Stream stream) {
  GpuSpan run = job.span_of(of);
  run.x = of.y;
  const std::int64_t stride = of.payloads[1] - of.payloads[0];
  Encoding how;
  how.received = {of.payloads[1], stride, kPayloads - 1};
  how.out = of.payloads[0];
  how.finishes = true;
  how.factor = 1.0F / kPayloads;
  job.codec().encode({&run, 1}, how, of.scratch, nullptr, stream);
}

void fold(const Job& job, Arrays& of, Stream stream) {
  auto* const y = reinterpret_cast<std::byte*>(of.y);
  const FoldSpan run{y, y, job.n(), 0};
  check(job.api(),
        job.api().fold_spans(static_cast<int>(DType::kFloat32), static_cast<int>(ReduceOp::kSum),
                             &run, 1, {reinterpret_cast<const std::byte*>(of.x), 0, 1}, 1, stream),
        "fold");
}

// All that one rank computes between the sums over ranks.
void factor(const Job& job, Arrays& of, Stream stream) {
  const Api& api = job.api();
  std::uint64_t rows = 1;
  while (rows * rows * 4 <= job.n()) rows *= 2;
  const codec::Factors shape{rows, job.n() / rows, kRank};
  auto* const p = reinterpret_cast<float*>(of.scratch);
  float *const q = p + rows * kRank, *const own_q = q + shape.columns * kRank;
  const GpuMatrix matrix{.of = shape,
                         .x = of.x,
                         .y = of.y,
                         .span_feedback = of.span_feedback,
                         .p = p,
                         .room = reinterpret_cast<double*>(of.payloads[0]),
                         .q = q,
                         .own_q = own_q,
                         .scales = own_q + shape.columns * kRank};
  check(api, api.start_factor(&matrix, 1, stream), "start_factor");
  check(api, api.left_factor(&matrix, 1, stream), "left_factor");
  check(api, api.orthonormalise(&matrix, 1, stream), "orthonormalise");
  check(api, api.right_factor(&matrix, 1, stream), "right_factor");
  check(api, api.take_headroom(&matrix, 1, stream), "take_headroom");
  check(api, api.product(&matrix, 1, 1, stream), "product");
}

struct Kind {
  const char* name;
  const char* codec;  // empty: none
  bool feedback;
  int payloads;
  Work work;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"fold", "", false, 0, fold},
      {"fp16 encode", "fp16", false, 1, encode},
      {"fp16 encode, feedback", "fp16", true, 1, encode},
      {"fp16 decode-add", "fp16", false, 1, decode_add},
      {"fp16 ring round", "fp16", false, 2, round},
      {"bf16 encode", "bf16", false, 1, encode},
      {"int8 encode, feedback", "int8", true, 1, encode},
      {"int8 decode-add", "int8", false, 1, decode_add},
      {"onebit encode, feedback", "onebit", true, 1, encode},
      {"onebit encode, feedback, blocks of 8192", "onebit:block=8192", true, 1, encode},
      {"onebit decode-add", "onebit", false, 1, decode_add},
      {"onebit sum of 8", "onebit", false, kPayloads, sum},
      {"onebit owner's stage of 8", "onebit", true, kPayloads, own},
      {"threshold encode, feedback", "threshold:tau=2.6", true, 1, encode},
      {"threshold decode", "threshold:tau=2.6", false, 1, decode},
      {"topk encode, feedback", "topk:density=0.01", true, 1, encode},
      {"topk decode", "topk:density=0.01", false, 1, decode},
      {"lowrank, rank 4", "", true, 1, factor},
  };
  return all;
}

// ---- Their arrays ------------------------------------------------------------------------------

const Kind& kind_of(std::string_view name) {
  for (const Kind& each : kinds())
    if (name == each.name) return each;
  throw InvalidArgument("no job '" + std::string(name) + "'");
}

Job::Job(const Api& api, std::string_view name, std::uint64_t n, int sets) : on_(api), n_(n) {
  const Kind& kind = kind_of(name);
  work_ = kind.work;
  const bool needs_onebit = std::string_view(kind.codec).starts_with("onebit");
  const bool needs_topk = std::string_view(kind.codec).starts_with("topk");
  if ((needs_onebit && api.onebit_encode_spans == nullptr) ||
      (needs_topk && api.topk_encode_spans == nullptr))
    throw InvalidArgument("the library has no " + std::string(kind.codec));
  if (*kind.codec != '\0') codec_ = GpuCodec::make(api, *codec::make_codec(kind.codec));
  for (int i = 0; i < sets; ++i) {
    sets_.push_back(std::make_unique<Arrays>(api));
    make(*sets_.back(), kind.feedback, kind.payloads);
  }
}

// Normal values: some that are drawn, over and over.
float* Job::floats(Room& room, float scale) const {
  static const Floats drawn = [] {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    Floats values(kDrawn);
    for (float& each : values) each = normal(random);
    return values;
  }();
  auto* const data = reinterpret_cast<float*>(room.take((n_ + 1) * sizeof(float)));
  on_.copy(data, drawn.data(), std::min(kDrawn, n_) * sizeof(float), CopyKind::kToDevice);
  for (std::uint64_t i = kDrawn; i < n_; i += kDrawn)
    on_.copy(data + i, data, std::min(kDrawn, n_ - i) * sizeof(float), CopyKind::kOnDevice);
  if (scale != 1)
    on_.run(on_.api.scale(static_cast<int>(DType::kFloat32), data, scale, n_, on_.stream), "scale");
  on_.run(on_.api.synchronize(on_.stream), "synchronize");
  return data;
}

void Job::make(Arrays& of, bool feedback, int payloads) const {
  of.x = floats(of.rooms[0], 1);
  of.y = floats(of.rooms[1], 1);
  if (feedback) {
    of.span_feedback.residual[0] = floats(of.rooms[2], kSmall);
    of.span_feedback.residual[1] = floats(of.rooms[3], kSmall);
    of.span_feedback.key_state =
        reinterpret_cast<GpuKeyState*>(of.rooms[4].take(sizeof(GpuKeyState)));
    on_.run(on_.api.fill(of.span_feedback.key_state, 0, sizeof(GpuKeyState), on_.stream), "fill");
  }
  // lowrank works in a few vectors of the matrix's sides.
  const std::uint64_t side = 64 + static_cast<std::uint64_t>(std::sqrt(n_)) * 4;
  const std::size_t scratch = codec_ ? codec_->scratch_bytes(n_) : 16 * side * kRank;
  const std::size_t bytes = codec_ ? codec_->payload_bytes(n_) : 16 * side * kRank;
  of.scratch = of.rooms[5].take(aligned(scratch) + kPayloadAlignment);
  if (payloads > 0) of.rooms[6].take(static_cast<std::size_t>(payloads) * aligned(bytes));
  for (int i = 0; i < payloads; ++i) {
    of.payloads[static_cast<std::size_t>(i)] =
        of.rooms[6].data() + static_cast<std::size_t>(i) * aligned(bytes);
    if (!codec_) continue;
    GpuSpan run = span_of(of);
    run.span_feedback = {};
    codec_->encode(run, of.payloads[static_cast<std::size_t>(i)], of.scratch, on_.stream);
  }
  on_.run(on_.api.synchronize(on_.stream), "synchronize");
}

std::string said;  // by the last error

}  // namespace
}  // namespace gradwire::cuda

#define EXPORTED extern "C" __attribute__((visibility("default")))

using gradwire::cuda::Job;

EXPORTED const char* gpu_job_error() { return gradwire::cuda::said.c_str(); }

// Null: gpu_job_error() says why.
EXPORTED void* gpu_job_make(const char* library, const char* name, std::uint64_t n, int sets) {
  try {
    return new Job(gradwire::cuda::load_api(library), name, n, sets);
  } catch (const std::exception& error) {
    gradwire::cuda::said = error.what();
    return nullptr;
  }
}

// 0, or gpu_job_error() says why not.
EXPORTED int gpu_job_run(void* job, int set, void* stream) {
  try {
    static_cast<Job*>(job)->run(set, static_cast<gradwire::cuda::Stream>(stream));
    return 0;
  } catch (const std::exception& error) {
    gradwire::cuda::said = error.what();
    return 1;
  }
}

// Waits for what it has enqueued.
EXPORTED void gpu_job_free(void* job) { delete static_cast<Job*>(job); }
