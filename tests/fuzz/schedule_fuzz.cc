// The text form of a schedule, and what is done with a schedule that came as text: the verifier
// follows it, and where it is right, every rank plans it.
//   input: the text
#include "fuzz.h"
#include "gradwire/exec/plan/plan.h"
#include "gradwire/schedule/verify.h"

namespace gradwire::fuzz {
namespace {

using schedule::Schedule;

// What the verifier's time grows with.
bool is_small(const Schedule& schedule) {
  std::size_t edges = 0;
  for (const auto& round : schedule.rounds) edges += round.size();
  return schedule.ranks <= 16 && schedule.chunks <= 256 && edges <= 256;
}

void plan(const Schedule& schedule, bool in_tree, Rank rank) {
  exec::Binding binding;
  binding.spec.counts = binding.counts = {1000};
  binding.spec.algorithm = schedule.name;
  binding.rank = rank;
  binding.in_tree = in_tree;
  binding.codec = codec::make_codec(in_tree ? "fp16" : "none");
  binding.max_message = 512;
  const exec::Plan made(schedule, binding);
  const auto check = [&made](const auto& frames) {
    for (const exec::Frame& frame : frames)
      for (const exec::Chunk& chunk : made.chunks(frame))
        for (const exec::Span& span : made.spans(chunk))
          require(span.array == 0 && span.offset + span.count <= 1000);
  };
  check(made.sends());
  check(made.receives());
}

void use(const Schedule& schedule) {
  require(schedule::parse_schedule(schedule::to_text(schedule)) == schedule);
  if (!is_small(schedule)) return;
  const schedule::Report report = schedule::verify(schedule);
  if (!report.ok() || schedule.collective != Collective::kAllReduce) return;
  for (Rank rank = 0; rank < schedule.ranks; ++rank) plan(schedule, report.in_tree, rank);
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    gradwire::fuzz::use(gradwire::schedule::parse_schedule(text));
  } catch (const gradwire::ScheduleError&) {
  }
  return 0;
}
