#include "gradwire/exec/plan/request.h"

#include <algorithm>
#include <string>

#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace {

[[noreturn]] void refuse(const Request& request, const std::string& what) {
  throw InvalidArgument(std::string(name_of(request.collective)) + ": " + what);
}

[[noreturn]] void refuse_op(ReduceOp op, DType dtype) {
  std::string defined;
  for (int i = 0; i < kReduceOps; ++i)
    if (const auto each = static_cast<ReduceOp>(i); is_defined(each, dtype))
      defined += (defined.empty() ? "" : ", ") + std::string(name_of(each));
  throw InvalidArgument("op '" + std::string(name_of(op)) + "' of " + std::string(name_of(dtype)) +
                        " is not defined; use one of: " + defined +
                        (op == ReduceOp::kAvg ? "; divide the sum, or average floats" : ""));
}

void require_equal_counts(const Request& request) {
  const auto& in = request.inputs;
  const auto& out = request.outputs;
  if (in.size() != out.size())
    refuse(request, "needs as many output arrays as input arrays, got " +
                        std::to_string(out.size()) + " and " + std::to_string(in.size()));
  for (std::size_t i = 0; i < in.size(); ++i)
    if (in[i].count != out[i].count)
      refuse(request, "output array " + std::to_string(i) + " has " + std::to_string(out[i].count) +
                          " elements, its input " + std::to_string(in[i].count));
}

// Throws unless one side has a block of each array for each rank, those of rank 0 first, and the
// other side arrays as long as this rank's blocks.
void require_blocks(const Request& request, std::span<const Array> blocks,
                    std::span<const Array> own) {
  if (own.empty() || blocks.size() != own.size() * at(request.size))
    refuse(request, "needs a block of each array for each of the " + std::to_string(request.size) +
                        " ranks, got " + std::to_string(blocks.size()) + " blocks of " +
                        std::to_string(own.size()) + " arrays");
  for (std::size_t i = 0; i < own.size(); ++i)
    if (const auto count = blocks[at(request.rank) * own.size() + i].count; own[i].count != count)
      refuse(request, "this rank's block of array " + std::to_string(i) + " has " +
                          std::to_string(count) + " elements, the array on the other side " +
                          std::to_string(own[i].count));
}

void require_one(const Request& request, std::span<const Array> arrays, const char* which) {
  if (arrays.size() != 1)
    refuse(request,
           std::string("needs one ") + which + " array, got " + std::to_string(arrays.size()));
}

// Walks over keys that lie end to end.
class KeyWalk {
 public:
  explicit KeyWalk(std::span<const codec::KeyedArray> keys) : keys_(keys) {}

  // Takes a step of at most `most` elements that stays within one key, and returns its length.
  // Beyond the last key a step takes all `most`.
  std::uint64_t step(std::uint64_t most) {
    for (; !keys_.empty() && used_ == keys_.front().count; used_ = 0) keys_ = keys_.subspan(1);
    const std::uint64_t length = keys_.empty() ? most : std::min(most, keys_.front().count - used_);
    used_ += length;
    return length;
  }

 private:
  std::span<const codec::KeyedArray> keys_;
  std::uint64_t used_ = 0;  // elements of the first key
};

std::size_t most_keys_of_block(const Request& request) {
  KeyWalk keys(request.keys);
  std::size_t most = 1;
  for (const Array& block : request.inputs) {
    std::size_t parts = 0;
    for (std::uint64_t left = block.count; left > 0; ++parts) left -= keys.step(left);
    most = std::max(most, parts);
  }
  return most;
}

void append_parts_by_key(const Request& request, std::vector<std::uint64_t>& out) {
  KeyWalk keys(request.keys);
  const std::size_t parts = most_keys_of_block(request);
  for (const Array& block : request.inputs) {
    std::uint64_t left = block.count;
    for (std::size_t i = 0; i < parts; ++i) {
      out.push_back(keys.step(left));
      left -= out.back();
    }
  }
}

}  // namespace

void check_arrays(const Request& request) {
  const auto& in = request.inputs;
  const auto& out = request.outputs;
  const bool root = request.rank == request.root;
  switch (request.collective) {
    case Collective::kAllReduce:
      return require_equal_counts(request);
    case Collective::kReduce:
    case Collective::kBroadcast:
      if (root) require_equal_counts(request);
      return;
    case Collective::kReduceScatter:
      return require_blocks(request, in, out);
    case Collective::kAllGather:
      return require_blocks(request, out, in);
    case Collective::kGather:
      require_one(request, in, "input");
      if (root) require_blocks(request, out, in);
      return;
    case Collective::kScatter:
      require_one(request, out, "output");
      if (root) require_blocks(request, in, out);
      return;
    case Collective::kAllToAll:
      if (in.size() != at(request.size) || out.size() != in.size())
        refuse(request, "needs an input and an output block for each of the " +
                            std::to_string(request.size) + " ranks, got " +
                            std::to_string(in.size()) + " and " + std::to_string(out.size()));
      return require_blocks(request, in, out.subspan(at(request.rank), 1));
  }
}

void check_types(Collective collective, DType dtype, ReduceOp op, const codec::Codec& codec) {
  if (reduces(collective) && !is_defined(op, dtype)) refuse_op(op, dtype);
  if (codec.combine() == codec::Combine::kPlain) return;
  if (!reduces(collective))
    throw InvalidArgument("codec '" + codec.name() + "' is for collectives that add; " +
                          std::string(name_of(collective)) + " moves data as it is");
  if (codec.between_sites() && collective != Collective::kAllReduce)
    throw InvalidArgument("codec '" + codec.name() + "' is for all_reduce alone, not for " +
                          std::string(name_of(collective)));
  if (dtype != DType::kFloat32)
    throw InvalidArgument("codec '" + codec.name() + "' needs float32, not " +
                          std::string(name_of(dtype)) +
                          (is_complex(dtype) ? "; pass its real and imaginary parts" : ""));
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg)
    throw InvalidArgument("codec '" + codec.name() + "' is for op 'sum' or 'avg', not '" +
                          std::string(name_of(op)) + "'");
}

std::uint64_t input_bytes(const Request& request) noexcept {
  std::uint64_t elements = 0;
  for (const Array& each : request.inputs) elements += each.count;
  return elements * size_of(request.dtype);
}

bool counts_known_to_all(Collective collective) {
  return collective != Collective::kGather && collective != Collective::kScatter &&
         collective != Collective::kAllToAll;
}

OpSpec spec_of(const Request& request) {
  OpSpec spec;
  spec.collective = request.collective;
  spec.dtype = request.dtype;
  spec.op = request.op;
  spec.root = request.root;
  spec.algorithm = request.schedule != nullptr ? request.schedule->name : request.algorithm;
  spec.schedule_digest = request.schedule_digest;
  spec.codec = request.codec_label;
  if (spec.codec.empty()) spec.codec = request.codec ? request.codec->name() : "none";
  spec.moved = request.moved;
  return spec;
}

void array_counts(const Request& request, std::vector<std::uint64_t>& out) {
  out.clear();
  const Rank rank = request.rank;
  const auto p = at(request.size);
  auto append = [&out](std::span<const Array> arrays) {
    for (const Array& each : arrays) out.push_back(each.count);
  };
  switch (request.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
      return append(request.inputs);
    case Collective::kReduceScatter:
      return append_parts_by_key(request, out);
    case Collective::kBroadcast:
    case Collective::kAllGather:
      return append(request.outputs);
    case Collective::kGather:
    case Collective::kScatter: {
      const bool gathers = request.collective == Collective::kGather;
      if (rank == request.root) return append(gathers ? request.outputs : request.inputs);
      out.assign(p, 0);
      out[at(rank)] = (gathers ? request.inputs : request.outputs)[0].count;
      return;
    }
    case Collective::kAllToAll:
      out.assign(p * p, 0);
      for (std::size_t d = 0; d < p; ++d) out[at(rank) * p + d] = request.inputs[d].count;
      for (std::size_t s = 0; s < p; ++s) out[s * p + at(rank)] = request.outputs[s].count;
      return;
  }
}

}  // namespace gradwire::exec
