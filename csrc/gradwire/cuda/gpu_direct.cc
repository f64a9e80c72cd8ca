#include "gradwire/cuda/gpu_direct.h"

namespace gradwire::cuda {

bool is_direct(const exec::Request& request, int size, const Messages& messages,
               const Feedback* feedback, const Codec* codec) {
  const bool plain = !request.codec || request.codec->combine() == codec::Combine::kPlain;
  const bool can = plain ? messages.has_reduce() && feedback == nullptr
                         : messages.staging() != nullptr && codec != nullptr && codec->has_reduce();
  return can && size > 1 && request.schedule == nullptr &&
         request.collective == Collective::kAllReduce &&
         (request.algorithm == "auto" || request.algorithm == "direct");
}

DirectCall::DirectCall(Communicator& of)
    : of_(of), pieces_(static_cast<std::size_t>(of.setting_.size)) {}

void DirectCall::run(Call& call) {
  exec::Request request = *call.request;
  request.algorithm = "direct";
  const auto plan = of_.plans_.find(request, {});
  if (plan->lossy()) {
    of_.begin(call);
    of_.bind_feedback(call);
  }
  list(*plan, call);
  reduce(call, *plan);
  for (const exec::Frame& each : plan->sends()) sent_ += each.bytes * plan->peers(each).size();
}

void DirectCall::reduce(Call& call, const exec::Plan& plan) {
  Messages& messages = *of_.messages_;
  if (!plan.lossy())
    return messages.reduce(runs_, {call.request->dtype, call.request->op, plan.divisor()},
                           call.stream);
  messages.check();
  call.codec->reduce(*messages.staging(), runs_, static_cast<float>(1.0 / plan.divisor()),
                     call.flags, call.stream);
  if (call.feedback != nullptr) of_.settle(call, /*shared=*/true);
}

// Lists the runs by their owners: those of a peer are what this rank sends it to be summed, its own
// ones are what a peer sends it.
void DirectCall::list(const exec::Plan& plan, const Call& call) {
  const exec::Request& request = *call.request;
  for (auto& each : pieces_) each.clear();
  for (const exec::Frame& each : plan.sends())
    if (each.round == 0) add(plan, each, plan.peers(each)[0]);
  for (const exec::Frame& each : plan.receives())
    if (each.round == 0 && pieces_[static_cast<std::size_t>(of_.setting_.rank)].empty())
      add(plan, each, of_.setting_.rank);
  runs_.clear();
  const std::size_t element = size_of(request.dtype);
  for (std::size_t owner = 0; owner < pieces_.size(); ++owner)
    for (const exec::Piece& each : pieces_[owner]) {
      SummedRun run{request.inputs[each.extent].data + each.offset * element,
                    request.outputs[each.extent].data + each.offset * element, each.count,
                    static_cast<int>(owner)};
      if (plan.lossy()) {
        const ExtentFeedback& its = call.extent_feedback[each.extent];
        run.run_feedback = its.run_feedback;
        run.call = its.call;
        run.element = its.element + each.offset;
      }
      for (float*& residual : run.run_feedback.residual)
        if (residual != nullptr) residual += each.offset;
      runs_.push_back(run);
    }
}

void DirectCall::add(const exec::Plan& plan, const exec::Frame& frame, int owner) {
  auto& into = pieces_[static_cast<std::size_t>(owner)];
  for (const exec::Part& part : plan.parts(frame))
    for (const exec::Piece& each : plan.pieces(part)) into.push_back(each);
}

}  // namespace gradwire::cuda
