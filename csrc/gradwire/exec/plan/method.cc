#include "gradwire/exec/plan/method.h"

#include <algorithm>
#include <string>
#include <utility>

#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace {

constexpr std::string_view kGatherName = "gather";

bool is_plain(const Request& request) {
  return !request.codec || request.codec->combine() == codec::Combine::kPlain;
}

bool is_shared(const Request& request) { return request.collective == Collective::kAllReduce; }

bool is_auto(const Request& request) {
  return request.algorithm == "auto" && request.schedule == nullptr;
}

void check_root(const Request& request) {
  if (request.root < 0 || request.root >= request.size)
    throw InvalidArgument("root " + std::to_string(request.root) +
                          " is not a rank; this communicator has " + std::to_string(request.size));
}

void check_feedback(const Request& request) {
  if (request.keys.empty())
    throw InvalidArgument("error feedback needs the key of each array, under which to keep it");
  const bool adds = request.op == ReduceOp::kSum || request.op == ReduceOp::kAvg;
  if (!reduces(request.collective) || !adds || request.dtype != DType::kFloat32)
    throw InvalidArgument("error feedback is for sums and averages of float32, not for " +
                          std::string(name_of(request.collective)) + " of " +
                          std::string(name_of(request.dtype)) + " with op '" +
                          std::string(name_of(request.op)) + "'");
}

void check_codec(const Request& request, const GpuLinks& links) {
  if (links.are_used && request.payloads)
    throw InvalidArgument("codec '" + std::string(request.codec_label) +
                          "' is written in Python and works on arrays in host memory: copy them "
                          "there, or take one of gradwire.codecs()");
  if (links.are_used && request.codec && request.codec->between_sites())
    throw InvalidArgument("codec '" + request.codec->name() +
                          "' works on arrays in host memory: copy them there, or leave out "
                          "between=sites");
  if (request.codec) check_types(request.collective, request.dtype, request.op, *request.codec);
}

// ---- Factors -----------------------------------------------------------------------------------

void check_shapes(const Request& request) {
  const auto& shapes = request.shapes;
  const std::string codec = "codec '" + request.codec->name() + "'";
  if (shapes.size() != request.inputs.size())
    throw InvalidArgument(codec + ": " + std::to_string(shapes.size()) + " shapes for " +
                          std::to_string(request.inputs.size()) + " arrays");
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const auto [rows, columns] = shapes[i];
    const std::size_t count = request.inputs[i].count;
    if (rows == 0 || columns == 0 ? count == 0 : count / rows == columns && count % rows == 0)
      continue;
    throw InvalidArgument(codec + ": array " + std::to_string(i) + " has " + std::to_string(count) +
                          " elements, which are no " + std::to_string(rows) + " x " +
                          std::to_string(columns) + " matrix");
  }
}

void check_lowrank(const Request& request) {
  if (!is_shared(request))
    throw ScheduleError("codec '" + request.codec->name() +
                        "' needs the sum of all factors on all ranks; use all_reduce, not " +
                        std::string(name_of(request.collective)));
  if (is_gather(request.algorithm))
    throw ScheduleError("codec '" + request.codec->name() +
                        "' has no payloads to gather: the sums of its factors travel; use auto, or "
                        "another algorithm of all_reduce");
  if (!request.shapes.empty()) check_shapes(request);
}

// ---- Payloads ----------------------------------------------------------------------------------

[[noreturn]] void refuse_to_add(const Request& request, const std::string& what,
                                const std::string& remedy) {
  const std::string codec =
      request.codec ? request.codec->name() : std::string(request.codec_label);
  throw ScheduleError("codec '" + codec + "': payloads that are gathered are not added on their " +
                      "way, as " + what + " would do; " + remedy);
}

// Returns the algorithm of the all_gather of a request whose payloads are gathered. Throws
// ScheduleError if the request wants them to travel otherwise.
std::string_view checked_gather_algorithm(const Request& request) {
  const std::string_view algorithm = request.algorithm;
  if (request.codec && request.codec->between_sites())
    refuse_to_add(request, "a site", "leave out between=sites");
  if (request.schedule != nullptr)
    refuse_to_add(request, "schedule '" + request.schedule->name + "'",
                  request.payloads ? "leave the schedule out" : "give the schedule or 'gather'");
  if (algorithm == "auto") return algorithm;
  if (!is_gather(algorithm))
    refuse_to_add(request, "algorithm '" + std::string(algorithm) + "'",
                  "use auto, gather or gather(ring)");
  return gather_algorithm(algorithm);
}

// Returns whether payloads are gathered. By "auto" that is only for a sum that all ranks want: for
// others a schedule sends fewer bytes, and encodes no more often. Most transports between GPUs send
// payloads whole, so that gathering those of several peers does not pay there.
bool gathers(const Request& request, const GpuLinks& links) {
  if (is_gather(request.algorithm))
    return !(is_plain(request) && is_shared(request));  // plain sums are gathered by a plan
  return is_auto(request) && !is_plain(request) && is_shared(request) &&
         request.codec->gathers(request.size) && !request.codec->between_sites() &&
         (!links.are_used || request.size == 2);
}

std::string_view algorithm_of_gather(const Request& request) {
  if (is_plain(request))
    throw ScheduleError(std::string(name_of(request.collective)) + " by '" +
                        std::string(request.algorithm) + "': without codec only all_reduce " +
                        "gathers; use auto" + (reduces(request.collective) ? ", or a codec" : ""));
  return checked_gather_algorithm(request);
}

// ---- Native collectives ------------------------------------------------------------------------

bool has_native_type(DType dtype) {
  return dtype != DType::kInt16 && dtype != DType::kUInt16 && dtype != DType::kBool &&
         !is_complex(dtype);
}

bool has_native_op(ReduceOp op, DType dtype) {
  if (op == ReduceOp::kSum || op == ReduceOp::kProd) return true;
  if (op == ReduceOp::kAvg) return is_floating(dtype);
  // Of floats, NCCL's lose NaN.
  return (op == ReduceOp::kMin || op == ReduceOp::kMax) && !is_floating(dtype);
}

bool has_equal_blocks(const Request& request) {
  const auto blocks =
      request.collective == Collective::kReduceScatter ? request.inputs : request.outputs;
  return std::cmp_equal(blocks.size(), request.size) &&
         std::ranges::all_of(blocks,
                             [&](const Array& each) { return each.count == blocks.front().count; });
}

std::string why_no_collective(const Request& request, bool feeds_back) {
  switch (request.collective) {
    case Collective::kAllReduce:
    case Collective::kBroadcast:
      return "";
    case Collective::kReduce:
      return feeds_back ? "it delivers residuals in all_reduce only" : "";
    case Collective::kReduceScatter:
    case Collective::kAllGather:
      if (feeds_back) return "it delivers residuals in all_reduce only";
      return has_equal_blocks(request) ? "" : "it has that of one array in equal blocks";
    default:
      return "it has no " + std::string(name_of(request.collective));
  }
}

// Returns why native collectives cannot make a call; empty if they can.
std::string why_not_native(const Request& request, bool feeds_back) {
  if (!is_plain(request)) return "it sends no codec's payloads";
  if (!has_native_type(request.dtype)) return "it has no " + std::string(name_of(request.dtype));
  if (reduces(request.collective) && !has_native_op(request.op, request.dtype))
    return "it has no " + std::string(name_of(request.op)) + " of " +
           std::string(name_of(request.dtype)) + " as gradwire defines it";
  return why_no_collective(request, feeds_back);
}

bool is_native(const Request& request, bool feeds_back, const GpuLinks& links) {
  if (!links.are_used || request.schedule != nullptr || request.size == 1) return false;
  const bool is_16_bit = request.dtype == DType::kFloat16 || request.dtype == DType::kBFloat16;
  if (request.algorithm == "auto")  // schedules add 16-bit floats in float32
    return links.have_collectives && why_not_native(request, feeds_back).empty() &&
           !(is_16_bit && reduces(request.collective));
  if (request.algorithm != "nccl") return false;
  const std::string why = links.have_collectives
                              ? why_not_native(request, feeds_back)
                              : "messages between these GPUs go over " + std::string(links.name);
  if (why.empty()) return true;
  throw ScheduleError(std::string(name_of(request.collective)) +
                      " by 'nccl', its own collective: " + why + "; use auto");
}

// Takes `direct` for codecs where the library between the GPUs makes it in two operations, whatever
// the model says; hosts of several GPUs are left to the model, which joins them first.
std::string_view algorithm_of_plan(const Request& request, const GpuLinks& links) {
  const bool direct = links.have_collectives && links.one_level && is_auto(request) &&
                      !is_plain(request) && is_shared(request);
  return direct ? "direct" : request.algorithm;
}

}  // namespace

bool is_gather(std::string_view algorithm) {
  return algorithm == kGatherName || (algorithm.starts_with("gather(") && algorithm.ends_with(')'));
}

std::string_view gather_algorithm(std::string_view algorithm) {
  if (algorithm == kGatherName) return "auto";
  constexpr std::size_t kOpening = kGatherName.size() + 1;
  return algorithm.substr(kOpening, algorithm.size() - kOpening - 1);
}

Decision decide(const Request& request, bool feeds_back, const GpuLinks& links) {
  check_root(request);
  if (feeds_back) check_feedback(request);
  check_codec(request, links);
  if (request.payloads) return {Method::kExchange, checked_gather_algorithm(request)};
  if (request.codec && request.codec->combine() == codec::Combine::kCompound) {
    check_lowrank(request);
    return {Method::kLowRank, request.algorithm};
  }
  if (is_native(request, feeds_back, links)) return {Method::kNative, request.algorithm};
  if (gathers(request, links)) return {Method::kGather, algorithm_of_gather(request)};
  return {Method::kPlan, algorithm_of_plan(request, links)};
}

}  // namespace gradwire::exec
