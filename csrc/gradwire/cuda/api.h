// The interface between the core and gradwire_cuda, a shared object of its own (cuda/plugin/), so
// that one build of the core works with and without a GPU, a driver and a CUDA compiler. It is a
// table of C functions, which cuda/device.h loads.
//
// A function that enqueues work takes its stream and returns at once. It neither allocates nor
// waits for the host, so that it may be captured in a graph. The device of the stream must be the
// calling thread's (set_device). Sizes are 64-bit. Pointers to elements need only an element's
// alignment; n = 0 is allowed, with null pointers, and does nothing. Payloads are aligned to
// kPayloadAlignment.
//
// The codecs' bytes and results equal the CPU's, bit for bit; csrc/gradwire/codec/ defines them.
// Only the places of the units differ for a codec whose size varies: see Slots.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;
struct CUevent_st;

namespace gradwire::cuda {

inline constexpr std::uint32_t kApiVersion = 8;

using Status = int;                                       // cudaError_t; 0 is success
inline constexpr Status kNoDriver = 35, kNoDevice = 100;  // there is no GPU

using Stream = CUstream_st*;  // null: the device's default stream
using Event = CUevent_st*;

inline constexpr std::size_t kPayloadAlignment = 16;  // bytes

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

// The bits of a word of device memory that tells what became of a call. Bits are only ever set.
enum Flag : std::uint32_t {
  kNotFinite = 1,  // NaN or Inf among the results
  kRefused = 2,    // a payload that its codec refuses: its elements become NaN
  kLost = 4,       // bytes that never came: the call has failed, and results are undefined
};

// The state that codecs adapt to one key (codec/codec.h).
struct CodecState {
  float tau;
  std::uint64_t sent;
  std::uint32_t largest;  // bits of a non-negative float, which compare as the float does
};

// One key's state, in device memory; all zero at first. Of each pair, element `which` is as the
// last kept call left it, and the other one belongs to the call under way.
struct KeyState {
  std::uint32_t which;         // 0 or 1
  std::uint32_t which_memory;  // likewise
  std::uint64_t calls;         // kept so far
  CodecState codec_state[2];
};

// A run's error feedback: e is residual[key_state->which], e' is the other one. Where both are
// null, no error is kept; key_state still holds what a codec adapts.
struct RunFeedback {
  float* residual[2];
  KeyState* key_state;
};

// A run of elements in one of a call's arrays. One kernel works on many runs, which a call passes
// as an array in host memory that may be freed when the call returns.
struct Run {
  const float* x = nullptr;
  float* y = nullptr;  // may be x
  std::uint64_t n = 0;
  RunFeedback run_feedback{};
  std::uint64_t call = 0;      // for Int8Rounding
  std::uint64_t element = 0;   // likewise: index of the first element in its extent
  std::uint64_t payload = 0;   // bytes: where its payload begins in a message
  std::uint64_t received = 0;  // the same of the messages that an encoder adds
};

// Messages of one layout: a run's payload in message j is at first + j · stride + run.payload, or
// run.received. Where the codec's size varies, a payload is a table of its units' sizes, padded to
// kPayloadAlignment, and then their slots (Slotted in messages/messages.h). Messages that an
// encoder adds may lie in two stretches: from message `turn` on, they are `jump` bytes further.
struct Payloads {
  const std::byte* first = nullptr;
  std::int64_t stride = 0;
  int count = 0;
  int turn = 0;
  std::int64_t jump = 0;

  // Returns how far behind the first one message j is.
  constexpr std::int64_t offset(int j) const { return j * stride + (j >= turn ? jump : 0); }
};

// What an encoder does beside encoding. It adds `received` to x, one payload after the other,
// before it encodes. Where it finishes, y := what all ranks decode, times factor.
struct Encoding {
  Payloads received{};
  std::byte* out = nullptr;  // the message
  bool finishes = false;
  float factor = 1;
};

// What a decoder does: y := y + each payload in turn, or y := the sum of all payloads, times
// factor.
struct Decoding {
  Payloads payloads{};
  bool adds = false;
  float factor = 1;  // 1 where it adds
};

// A run of elements that are folded: y := x (op) addends. Addend j is at addends.first + j ·
// addends.stride + `addend` bytes. Without addends it is a copy.
struct FoldRun {
  const std::byte* x = nullptr;
  std::byte* y = nullptr;  // may be x
  std::uint64_t n = 0;
  std::uint64_t addend = 0;
};

// A run of 16-bit floats that fold_wide_runs() folds.
struct WideRun {
  const std::byte* own = nullptr;  // may be null
  float* sum = nullptr;
  std::byte* y = nullptr;  // may be null
  std::uint64_t n = 0;
  std::uint64_t addend = 0;
};

// How int8 rounds, and what a run's random numbers depend on (codec/int8.cc). The number of the
// call is `call`; with feedback, `call` ^ key_state->calls.
struct Int8Rounding {
  bool stochastic;
  std::uint64_t seed;
  std::uint64_t call;
  std::uint64_t element;  // index of the run's first element in its extent
};

enum class Cast : std::int32_t { kFp16, kBf16 };
enum class Values : std::int32_t { kFloat32, kFp16, kBf16 };  // how topk sends values

// The most runs of one launch, whose table is among the kernel's arguments (4 KB at most): a call
// with more runs launches several kernels.
inline constexpr int kMostRuns = 40;

enum class CopyKind : std::int32_t { kToDevice, kToHost, kOnDevice };

struct DeviceInfo {
  char name[256];
  int major, minor;      // compute capability
  std::uint64_t memory;  // bytes
  char bus_id[32];
  std::uint8_t uuid[16];
};

// A matrix and its factors (codec/factors.h).
struct Matrix {
  std::uint64_t rows, columns, rank;
};

// What a codec remembers of a key: factor[key_state->which_memory]; the other one belongs to the
// call under way. All zeros: nothing is remembered yet. Both null: the codec remembers nothing.
struct Memory {
  float* factor[2];
  const KeyState* key_state;
};

// A matrix that a call factors, all of a call with the same rank. Its q and own_q are tiny, until
// take_headroom() takes the headroom of both out.
struct FactoredMatrix {
  Matrix of{};
  const float* x = nullptr;
  float* y = nullptr;  // may be x; with feedback x + e at first
  RunFeedback run_feedback{};
  Memory memory{};
  float* p = nullptr;       // left factor
  double* room = nullptr;   // rows · rank
  float* q = nullptr;       // what the left factor begins with, and then the sum of right factors
  float* own_q = nullptr;   // right factor; may be null where it is not kept
  float* scales = nullptr;  // of q and of own_q; start_factor() clears them
};

struct Api {
  std::uint32_t version;  // kApiVersion
  std::uint32_t bytes;    // sizeof(Api)

  // ---- The device (plugin/runtime.cu) ----
  const char* (*describe)(Status);                // for messages
  Status (*versions)(int* runtime, int* driver);  // 13000 is 13.0; driver 0: none
  Status (*device_count)(int* count);
  Status (*device_info)(int device, DeviceInfo* info);
  Status (*set_device)(int device);
  Status (*get_device)(int* device);
  int (*is_in_use)(int device);  // whether this process has begun to use it
  // *device := the device of an address, for the remedy in InvalidArgument; -1 where it is not
  // device memory.
  Status (*device_of)(const void* address, int* device);
  Status (*allocate)(void** address, std::size_t bytes);  // uninitialised
  Status (*release)(void* address);
  Status (*allocate_host)(void** address, std::size_t bytes);  // pinned
  Status (*release_host)(void* address);
  // Does not wait for the default stream, and goes before streams of the usual priority.
  Status (*create_stream)(Stream* stream);
  Status (*destroy_stream)(Stream stream);
  Status (*synchronize)(Stream stream);
  Status (*synchronize_device)();  // all of its streams
  // Lets this thread call CUDA without disturbing a capture that another thread has begun.
  Status (*relax_captures)();
  // *capture := 0 where the stream is not being captured, else a number of the capture.
  Status (*capture_of)(Stream stream, std::uint64_t* capture);
  Status (*create_event)(Event* event);  // without timing
  Status (*destroy_event)(Event event);
  Status (*record)(Event event, Stream stream);
  Status (*wait)(Stream stream, Event event);
  Status (*query)(Event event, int* done);
  Status (*copy)(void* to, const void* from, std::size_t bytes, CopyKind kind, Stream stream);
  Status (*fill)(void* to, int byte, std::size_t bytes, Stream stream);
  // The function may not call CUDA. Later work on the stream waits for it.
  Status (*call_host)(Stream stream, void (*function)(void*), void* argument);

  // ---- Elements (plugin/fold.cu, elements.cu); dtypes, ops: the numbers of DType, ReduceOp ----
  // y := x (op) addends of each run, in this order, averaged over `divisor` ranks unless that is 1.
  // One kernel for kMostRuns of them.
  Status (*fold_runs)(int dtype, int op, const FoldRun* runs, int count, Payloads addends,
                      int divisor, Stream);
  // Folds 16-bit floats in float32 (codec/reduction/fold.h), one addend after the other: sum := own
  // (op) x where own is not null, else sum (op) x. Where y is not null, it gets that value,
  // averaged and rounded, in place of sum.
  Status (*fold_wide_runs)(int dtype, int op, const WideRun* runs, int count,
                           const std::byte* addends, int divisor, Stream);
  Status (*scale)(int dtype, void* x, double factor, std::uint64_t n, Stream);  // of floats
  // y := x + e, e' := 0.
  Status (*deliver_runs)(const Run* runs, int count, Stream);
  // Sets kNotFinite where y is not finite; where unit > 1, the whole unit becomes NaN then
  // (codec/codec.h, mark_not_finite()).
  Status (*mark_runs)(const Run* runs, int count, std::uint64_t unit, std::uint32_t* flags, Stream);
  // flags := flags | *more. Either may be in pinned memory.
  Status (*add_flags)(const std::uint32_t* more, std::uint32_t* flags, Stream);
  // y of all runs := NaN if any flag is set.
  Status (*poison)(const Run* runs, int count, const std::uint32_t* flags, Stream);

  // ---- Keys (plugin/elements.cu); key_states: an array of pointers in device memory ----
  // Begins a call with tau as the last call left it, and with nothing sent.
  Status (*open)(KeyState* const* key_states, std::uint64_t count, Stream);
  // Multiplies the residuals of the last kept calls, one run for each key, and what codecs have
  // adapted to them, by `factor`; and by *now / *before where neither is null and both are
  // positive. Products that are too large become the largest float.
  Status (*scale_residuals)(const Run* runs, int count, double factor, const float* now,
                            const float* before, Stream);
  // y := 0 where the residual of the last kept call is 0, of runs that have one.
  Status (*clear_sent)(const Run* runs, int count, Stream);
  // Ends the call under way. Where no flag is set, its state becomes the kept one and, if
  // `remembers`, its memory too.
  Status (*settle)(KeyState* const* key_states, std::uint64_t count, bool remembers,
                   const std::uint32_t* flags, Stream);

  // ---- Codecs, by one kernel for kMostRuns runs; the flags of all decoders may be null ----

  // ---- fp16, bf16 (plugin/cast/cast.cu); kNotFinite where the payload is not finite ----
  Status (*cast_encode_runs)(Cast, float scale, const Run* runs, int count, const Encoding&,
                             std::uint32_t* flags, Stream);
  Status (*cast_decode_runs)(Cast, float scale, const Run* runs, int count, const Decoding&,
                             std::uint32_t* flags, Stream);

  // ---- int8 (plugin/int8/int8.cu) ----
  // Of the rounding, `call` and `element` are the runs'.
  Status (*int8_encode_runs)(std::uint64_t block, Int8Rounding, const Run* runs, int count,
                             const Encoding&, std::uint32_t* flags, Stream);
  Status (*int8_decode_runs)(std::uint64_t block, const Run* runs, int count, const Decoding&,
                             std::uint32_t* flags, Stream);

  // ---- onebit (plugin/onebit/onebit.cu, onebit_sum.cu) ----
  Status (*onebit_encode_runs)(std::uint64_t block, const Run* runs, int count, const Encoding&,
                               std::uint32_t* flags, Stream);
  Status (*onebit_decode_runs)(std::uint64_t block, const Run* runs, int count, const Decoding&,
                               std::uint32_t* flags, Stream);

  // ---- threshold, topk (plugin/sparse/); units of kSparseBlock ----
  // Sets tau of the call under way where the key has no usable one. Does nothing if `density` is 0:
  // tau is given then. `scratch` has threshold_scratch_bytes(units of all runs).
  Status (*threshold_prepare)(const float* x, RunFeedback, std::uint64_t n, double density,
                              void* scratch, Stream);
  Status (*threshold_adapt)(std::uint64_t n, double density, KeyState* key_state, Stream);
  // They neither add what was received nor finish, and decode one payload. The encoder uses the
  // given tau if that is > 0, else the call's or, where that is not usable, one for each unit.
  Status (*threshold_encode_runs)(float tau, double density, const Run* runs, int count,
                                  const Encoding&, void* scratch, Stream);
  Status (*threshold_decode_runs)(const Run* runs, int count, const Decoding&, std::uint32_t* flags,
                                  Stream);
  Status (*topk_encode_runs)(double density, Values, std::uint64_t slot_bytes, const Run* runs,
                             int count, const Encoding&, void* scratch, Stream);
  Status (*topk_decode_runs)(std::uint64_t slot_bytes, Values, const Run* runs, int count,
                             const Decoding&, std::uint32_t* flags, Stream);
  std::size_t (*threshold_scratch_bytes)(std::uint64_t units);
  std::size_t (*topk_scratch_bytes)(std::uint64_t units);

  // ---- lowrank (plugin/lowrank/lowrank.cu, factors.cu, orthonormalise.cu); codec/factors.h ----
  // Each is one kernel for 28 matrices, but for orthonormalise(), one for each factor.
  // q := start_factor(what the last call remembers).
  Status (*start_factor)(const FactoredMatrix* matrices, int count, Stream);
  // With feedback y := x + e; p := x · q, or y · q.
  Status (*left_factor)(const FactoredMatrix* matrices, int count, Stream);
  // Sets kNotFinite where x is not finite.
  Status (*check_finite)(const float* x, std::uint64_t n, std::uint32_t* flags, Stream);
  Status (*orthonormalise)(const FactoredMatrix* matrices, int count, Stream);
  // own_q := xᵀ · p, or yᵀ · p.
  Status (*right_factor)(const FactoredMatrix* matrices, int count, Stream);
  // scales, which are 0 before, := take_headroom(q), take_headroom(own_q). Large ones have kernels
  // of their own.
  Status (*take_headroom)(const FactoredMatrix* matrices, int count, Stream);
  // y := limit(p·qᵀ · (scales[0] · factor)), e' := limit(y − limit(p·own_qᵀ · scales[1])).
  Status (*product)(const FactoredMatrix* matrices, int count, float factor, Stream);
  // Stores q for the next call to begin with.
  Status (*remember)(const FactoredMatrix* matrices, int count, Stream);
};

using GetApi = const Api* (*)();
inline constexpr const char* kGetApi = "gradwire_cuda_api";

}  // namespace gradwire::cuda
