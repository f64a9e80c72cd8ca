// What a rank makes of a peer's control frames: root causes, disagreements, whom everybody waits
// for.
//   input: see control_frames.h
#include <memory>

#include "control_frames.h"
#include "gradwire/exec/control/control_plane.h"
#include "gradwire/schedule/generators.h"

namespace gradwire::fuzz {
namespace {

using exec::ControlPlane;

std::shared_ptr<const exec::Plan> plan() {
  schedule::Recipe recipe;
  recipe.ranks = 3;
  exec::Binding binding;
  binding.spec.counts = binding.counts = {10};
  binding.codec = codec::make_codec("none");
  binding.max_message = 512;
  return std::make_shared<const exec::Plan>(schedule::generate(recipe), binding);
}

// An error that users can be told.
void require_typed(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Error&) {
  }
}

// One call, and what the peer says meanwhile; whether the plane has seen enough.
bool is_over(ControlPlane& plane, UniqueFd& peer, Input& input) {
  static const auto called = plan();
  try {
    plane.begin_call(called);
    speak(peer, input);
    plane.query_positions();
    if (input.number<std::uint8_t>() % 2 == 0) plane.serve();
    plane.poll();
    const exec::ChainEnd end = plane.end_of_chain(1);
    require(end.peer >= kNoPeer && end.peer < 3 && end.job_peer >= kNoPeer);
    plane.announce();
    return false;
  } catch (const exec::RootCause& cause) {
    require_typed(cause.error);
  } catch (const exec::Disagreement& found) {
    while (!input.empty()) speak(peer, input);
    peer.reset();
    require_typed(plane.inquire(found));
  }
  return true;
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  const NoDescriptorLeft none;
  Input input(data, size);
  ControlPlane plane(0, 3, [] { return gradwire::exec::Position{}; });
  auto [own, peer] = socket_pair();
  plane.sockets().adopt(std::move(own), 1);
  while (!input.empty() && !is_over(plane, peer, input)) continue;
  return 0;
}
