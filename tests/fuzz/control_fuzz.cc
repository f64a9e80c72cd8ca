// Control frames, as a rank reads them from a peer's control socket.
//   input: see control_frames.h
#include "control_frames.h"

namespace gradwire::fuzz {
namespace {

constexpr int kSize = 3;
using transport::Control;

// Whether the peer is gone. What it tells is fit for use.
bool read_all(Control& control) {
  bool gone = false;
  while (const auto event = control.poll()) {
    require(!gone && event->from == 1);
    require(event->frame.culprit >= kNoPeer && event->frame.culprit < kSize);
    require(transport::text_of(event->frame).size() <= event->frame.text.size());
    gone = event->gone;
  }
  return gone;
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  const NoDescriptorLeft none;
  Input input(data, size);
  Control control(0, kSize);
  auto [own, peer] = socket_pair();
  control.adopt(std::move(own), 1);
  bool gone = false;
  while (!input.empty() && !gone) {
    speak(peer, input);
    control.broadcast({});
    gone = read_all(control);
  }
  peer.reset();
  gone |= read_all(control);
  require(gone || control.said_bye(1));
  require(!control.connected(1));
  return 0;
}
