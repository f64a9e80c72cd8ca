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
// Only the places of the units differ for a codec whose size varies (GpuPayloads).
//
// Words, of which only the first and the last occur outside of cuda/plugin/:
//   span    consecutive elements of one array; a launch works on many of them
//   tile    the elements of a span that a thread block, or a warp, takes at once
//   share   the elements of a tile that one thread moves
//   unit    the elements that a sparse codec or int4 encodes by themselves; int8 and onebit: block
//   stripe  the elements of such a block that one warp holds
//   lane    a thread of a warp, by its number there
//   team    the threads that work on one block of a codec: a warp, or a thread block
//   run     equal bits that follow each other in a mask of onebit
//   slot    the room of one unit's or block's payload, where sizes vary
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradwire/codec/factors.h"

struct CUstream_st;
struct CUevent_st;

namespace gradwire::cuda {

inline constexpr std::uint32_t kApiVersion = 9;

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
struct GpuCodecState {
  float tau;
  std::uint64_t sent;
  std::uint32_t largest;  // bits of a non-negative float, which compare as the float does
};

// One key's state, in device memory; all zero at first. Of each pair, element `which` is as the
// last kept call left it, and the other one belongs to the call under way.
struct GpuKeyState {
  std::uint32_t which;         // 0 or 1
  std::uint32_t which_memory;  // likewise
  std::uint64_t calls;         // kept so far
  GpuCodecState codec_state[2];
};

// A span's error feedback: e is residual[key_state->which], e' is the other one. Where both are
// null, no error is kept; key_state still holds what a codec adapts.
struct SpanFeedback {
  float* residual[2];
  GpuKeyState* key_state;
};

// A span of elements in one of a call's arrays. One kernel works on many spans, which a call passes
// as an array in host memory that may be freed when the call returns.
struct GpuSpan {
  const float* x = nullptr;
  float* y = nullptr;  // may be x
  std::uint64_t n = 0;
  SpanFeedback span_feedback{};
  std::uint64_t call = 0;      // for Int8Rounding
  std::uint64_t element = 0;   // likewise: index of the first element in its array
  std::uint64_t payload = 0;   // bytes: where its payload begins in a message
  std::uint64_t received = 0;  // the same of the messages that an encoder adds
};

// Messages of one layout: a span's payload in message j is at first + j · stride + span.payload, or
// span.received. Where the codec's size varies, a payload is a table of its units' sizes, padded to
// kPayloadAlignment, and then their slots (Slotted in messages/messages.h). Messages that an
// encoder adds may lie in two places: from message `turn` on, they are `jump` bytes further.
struct GpuPayloads {
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
  GpuPayloads received{};
  std::byte* out = nullptr;  // the message
  bool finishes = false;
  float factor = 1;
};

// What a decoder does: y := y + each payload in turn, or y := the sum of all payloads, times
// factor.
struct Decoding {
  GpuPayloads payloads{};
  bool adds = false;
  float factor = 1;  // 1 where it adds
};

// A span of elements that are folded: y := x (op) addends. Addend j is at addends.first + j ·
// addends.stride + `addend` bytes. Without addends it is a copy.
struct FoldSpan {
  const std::byte* x = nullptr;
  std::byte* y = nullptr;  // may be x
  std::uint64_t n = 0;
  std::uint64_t addend = 0;
};

// A span of 16-bit floats that fold_wide_spans() folds.
struct WideSpan {
  const std::byte* own = nullptr;  // may be null
  float* sum = nullptr;
  std::byte* y = nullptr;  // may be null
  std::uint64_t n = 0;
  std::uint64_t addend = 0;
};

// How int8 and int4 round, and what a span's random numbers depend on (codec/int8.cc). The number
// of the call is `call`; with feedback, `call` ^ key_state->calls.
struct Int8Rounding {
  bool stochastic;
  std::uint64_t seed;
  std::uint64_t call;
  std::uint64_t element;  // index of the span's first element in its array
};

enum class CastType : std::int32_t { kFp16, kBf16 };
enum class Values : std::int32_t { kFloat32, kFp16, kBf16, kTwoBits };  // how topk sends values

// The most spans of one launch, whose table is among the kernel's arguments (4 KB at most): a call
// with more spans launches several kernels.
inline constexpr int kMostSpans = 40;

enum class CopyKind : std::int32_t { kToDevice, kToHost, kOnDevice };

struct DeviceInfo {
  char name[256];
  int major, minor;      // compute capability
  std::uint64_t memory;  // bytes
  char bus_id[32];
  std::uint8_t uuid[16];
};

// What a codec remembers of a key: factor[key_state->which_memory]; the other one belongs to the
// call under way. All zeros: nothing is remembered yet. Both null: the codec remembers nothing.
struct Memory {
  float* factor[2];
  const GpuKeyState* key_state;
};

// A matrix that a call factors, all of a call with the same rank. Its q and own_q are tiny, until
// take_headroom() takes the headroom of both out.
struct GpuMatrix {
  codec::Factors of{};
  const float* x = nullptr;
  float* y = nullptr;  // may be x; with feedback x + e at first
  SpanFeedback span_feedback{};
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
  // y := x (op) addends of each span, in this order, averaged over `divisor` ranks unless that
  // is 1. One kernel for kMostSpans of them.
  Status (*fold_spans)(int dtype, int op, const FoldSpan* spans, int count, GpuPayloads addends,
                       int divisor, Stream);
  // Folds 16-bit floats in float32 (codec/reduction/fold.h), one addend after the other: sum := own
  // (op) x where own is not null, else sum (op) x. Where y is not null, it gets that value,
  // averaged and rounded, in place of sum.
  Status (*fold_wide_spans)(int dtype, int op, const WideSpan* spans, int count,
                            const std::byte* addends, int divisor, Stream);
  Status (*scale)(int dtype, void* x, double factor, std::uint64_t n, Stream);  // of floats
  // y := x + e, e' := 0.
  Status (*deliver_spans)(const GpuSpan* spans, int count, Stream);
  // Sets kNotFinite where y is not finite; where unit > 1, the whole unit becomes NaN then
  // (codec/codec.h, mark_not_finite()).
  Status (*mark_spans)(const GpuSpan* spans, int count, std::uint64_t unit, std::uint32_t* flags,
                       Stream);
  // flags := flags | *more. Either may be in pinned memory.
  Status (*add_flags)(const std::uint32_t* more, std::uint32_t* flags, Stream);
  // y of all spans := NaN if any flag is set.
  Status (*poison)(const GpuSpan* spans, int count, const std::uint32_t* flags, Stream);

  // ---- Keys (plugin/elements.cu); key_states: an array of pointers in device memory ----
  // Begins a call with tau as the last call left it, and with nothing sent.
  Status (*open)(GpuKeyState* const* key_states, std::uint64_t count, Stream);
  // Multiplies the residuals of the last kept calls, one span for each key, and what codecs have
  // adapted to them, by `factor`; and by *now / *before where neither is null and both are
  // positive. Products that are too large become the largest float.
  Status (*scale_residuals)(const GpuSpan* spans, int count, double factor, const float* now,
                            const float* before, Stream);
  // y := 0 where the residual of the last kept call is 0, of spans that have one.
  Status (*clear_sent)(const GpuSpan* spans, int count, Stream);
  // Ends the call under way. Where no flag is set, its state becomes the kept one and, if
  // `remembers`, its memory too.
  Status (*settle)(GpuKeyState* const* key_states, std::uint64_t count, bool remembers,
                   const std::uint32_t* flags, Stream);

  // ---- Codecs, by one kernel for kMostSpans spans; the flags of all decoders may be null ----

  // ---- fp16, bf16 (plugin/cast/cast.cu); kNotFinite where the payload is not finite ----
  Status (*cast_encode_spans)(CastType, float scale, const GpuSpan* spans, int count,
                              const Encoding&, std::uint32_t* flags, Stream);
  Status (*cast_decode_spans)(CastType, float scale, const GpuSpan* spans, int count,
                              const Decoding&, std::uint32_t* flags, Stream);

  // ---- int8 (plugin/int8/int8.cu) ----
  // Of the rounding, `call` and `element` are the spans'.
  Status (*int8_encode_spans)(std::uint64_t block, Int8Rounding, const GpuSpan* spans, int count,
                              const Encoding&, std::uint32_t* flags, Stream);
  Status (*int8_decode_spans)(std::uint64_t block, const GpuSpan* spans, int count, const Decoding&,
                              std::uint32_t* flags, Stream);

  // ---- int4 (plugin/int4/int4.cu) ----
  Status (*int4_encode_spans)(std::uint64_t block, Int8Rounding, const GpuSpan* spans, int count,
                              const Encoding&, std::uint32_t* flags, Stream);
  Status (*int4_decode_spans)(std::uint64_t block, bool stochastic, const GpuSpan* spans, int count,
                              const Decoding&, std::uint32_t* flags, Stream);

  // ---- onebit (plugin/onebit/onebit.cu, onebit_sum.cu) ----
  Status (*onebit_encode_spans)(std::uint64_t block, const GpuSpan* spans, int count,
                                const Encoding&, std::uint32_t* flags, Stream);
  Status (*onebit_decode_spans)(std::uint64_t block, const GpuSpan* spans, int count,
                                const Decoding&, std::uint32_t* flags, Stream);

  // ---- threshold, topk (plugin/sparse/); units of kSparseBlock ----
  // Sets tau of the call under way where the key has no usable one. Does nothing if `density` is 0:
  // tau is given then. `scratch` has threshold_scratch_bytes(units of all spans).
  Status (*threshold_prepare)(const float* x, SpanFeedback, std::uint64_t n, double density,
                              void* scratch, Stream);
  Status (*threshold_adapt)(std::uint64_t n, double density, GpuKeyState* key_state, Stream);
  // They neither add what was received nor finish, and decode one payload. The encoder uses the
  // given tau if that is > 0, else the call's or, where that is not usable, one for each unit.
  Status (*threshold_encode_spans)(float tau, double density, const GpuSpan* spans, int count,
                                   const Encoding&, void* scratch, Stream);
  Status (*threshold_decode_spans)(const GpuSpan* spans, int count, const Decoding&,
                                   std::uint32_t* flags, Stream);
  Status (*topk_encode_spans)(double density, Values, std::uint64_t slot_bytes,
                              const GpuSpan* spans, int count, const Encoding&, void* scratch,
                              Stream);
  Status (*topk_decode_spans)(std::uint64_t slot_bytes, Values, const GpuSpan* spans, int count,
                              const Decoding&, std::uint32_t* flags, Stream);
  std::size_t (*threshold_scratch_bytes)(std::uint64_t units);
  std::size_t (*topk_scratch_bytes)(std::uint64_t units);

  // ---- lowrank (plugin/lowrank/lowrank.cu, factors.cu, orthonormalise.cu); codec/factors.h ----
  // Each is one kernel for 28 matrices, but for orthonormalise(), one for each factor.
  // q := start_factor(what the last call remembers).
  Status (*start_factor)(const GpuMatrix* matrices, int count, Stream);
  // With feedback y := x + e; p := x · q, or y · q.
  Status (*left_factor)(const GpuMatrix* matrices, int count, Stream);
  // Sets kNotFinite where x is not finite.
  Status (*check_finite)(const float* x, std::uint64_t n, std::uint32_t* flags, Stream);
  Status (*orthonormalise)(const GpuMatrix* matrices, int count, Stream);
  // own_q := xᵀ · p, or yᵀ · p.
  Status (*right_factor)(const GpuMatrix* matrices, int count, Stream);
  // scales, which are 0 before, := take_headroom(q), take_headroom(own_q). Large ones have kernels
  // of their own.
  Status (*take_headroom)(const GpuMatrix* matrices, int count, Stream);
  // y := limit(p·qᵀ · (scales[0] · factor)), e' := limit(y − limit(p·own_qᵀ · scales[1])).
  Status (*product)(const GpuMatrix* matrices, int count, float factor, Stream);
  // Stores q for the next call to begin with.
  Status (*remember)(const GpuMatrix* matrices, int count, Stream);
};

using GetApi = const Api* (*)();
inline constexpr const char* kGetApi = "gradwire_cuda_api";

}  // namespace gradwire::cuda
