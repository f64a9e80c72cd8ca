// Request: what a caller asks for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "gradwire/base/op.h"
#include "gradwire/base/types.h"
#include "gradwire/codec/codec.h"
#include "gradwire/codec/feedback/feedback.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::exec {

// The shape of an array that is a matrix, row by row.
struct Shape {
  std::size_t rows = 1;
  std::size_t columns = 0;
};

struct ExchangePayloads;

// The shapes of the caller's arrays, which must be the same on all ranks. Ranks compare them in the
// first call that has them, or in each call.
struct ShapeCheck {
  std::uint64_t digest = 0;  // 0: not checked
  std::string_view text;     // "(2, 3)"; may be shortened
  bool always = false;
};

// Contiguous elements in the caller's memory. `data` may be null if `count` is 0.
struct Array {
  std::byte* data = nullptr;
  std::uint64_t count = 0;  // elements
};

// Which arrays a collective takes, at rank r of p:
//   all_reduce, reduce, broadcast   inputs = outputs in number and counts; in place where their
//                                   addresses are equal (reduce: outputs only at the root;
//                                   broadcast: inputs only at the root)
//   reduce_scatter                  inputs: p blocks; outputs: one, as long as block r
//   all_gather                      inputs: one; outputs: p blocks, block r as long as the input
//                                   (both: or k arrays for each block, those of block 0 first)
//   gather / scatter                p blocks at the root (outputs / inputs), one block everywhere
//   all_to_all                      p blocks in and p blocks out
struct Request {
  Rank rank = 0;  // of the caller; the communicator sets this
  int size = 1;   // ranks in the communicator, which sets this, too
  Collective collective = Collective::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  std::string_view algorithm = "auto";
  bool spares_bytes = false;                     // "auto" takes links between hosts to be slow ones
  const schedule::Schedule* schedule = nullptr;  // the user's own; then algorithm is ignored
  std::uint64_t schedule_digest = 0;             // of *schedule, computed once
  std::shared_ptr<const codec::Codec> codec;     // null: none
  // Lossy codecs: null for no error feedback. The keys lie end to end over all inputs. Each input
  // belongs to one key, except in reduce_scatter, where an input is a block of any number of keys.
  std::shared_ptr<codec::ErrorFeedback> feedback;
  std::span<const codec::KeyedArray> keys;
  // In place of a codec: payloads are exchanged (exec/program/cpu_device.h), and the arrays are not
  // touched.
  std::shared_ptr<ExchangePayloads> payloads;
  std::string_view codec_label;  // the codec's name as ranks compare it; empty: its own
  std::string_view moved;        // OpSpec::moved
  std::string_view trace_name;   // by which traces name the call; empty: its keys
  ShapeCheck shape_check;
  std::span<const Array> inputs;
  std::span<const Array> outputs;
  std::span<const Shape> shapes;  // of the inputs, for codecs of matrices; empty: all are vectors
  double timeout = 300;           // seconds, from when the operation starts to run
};

// Writes the elements of each array that the request's schedule works on (OpSpec::counts). Blocks
// of reduce_scatter are cut where keys end, all into equally many arrays, some of them empty. For
// gather, scatter and all_to_all only this rank's own counts are known: the others are 0, and
// uneven counts are checked frame by frame instead of in the fingerprint.
void array_counts(const Request& request, std::vector<std::uint64_t>& out);
// Returns the bytes of the caller's inputs, without a codec.
std::uint64_t input_bytes(const Request& request) noexcept;
// Returns whether all ranks know all counts. Each block of gather, scatter and all_to_all is known
// to only two ranks.
bool counts_known_to_all(Collective collective);
// Returns what ranks must agree on, without the counts.
OpSpec spec_of(const Request& request);
// Throws InvalidArgument if these do not fit together.
void check_types(Collective collective, DType dtype, ReduceOp op, const codec::Codec& codec);
// Throws InvalidArgument if inputs and outputs do not fit together.
void check_arrays(const Request& request);

}  // namespace gradwire::exec
