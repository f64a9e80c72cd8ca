// What a peer says on its control socket.
//   input: 1 byte, whether a frame of ours is altered or bytes come as they are; 1 byte, how many;
//          the bytes: what stands in the frame after its magic, or all of it. And so on.
#pragma once

#include "fuzz.h"
#include "gradwire/transport/control.h"

namespace gradwire::fuzz {

inline ConstBytes alter(transport::ControlFrame& frame, ConstBytes foreign) {
  const std::size_t magic = sizeof frame.magic;
  const std::size_t bytes = std::min(foreign.size(), sizeof frame - magic);
  auto* raw = reinterpret_cast<std::byte*>(&frame);
  if (bytes > 0) std::memcpy(raw + magic, foreign.data(), bytes);
  return {raw, sizeof frame};
}

inline void speak(const UniqueFd& peer, Input& input) {
  const bool ours = input.number<std::uint8_t>() % 2 == 0;
  const ConstBytes foreign = input.take(input.number<std::uint8_t>());
  transport::ControlFrame frame;
  say(peer, ours ? alter(frame, foreign) : foreign);
}

}  // namespace gradwire::fuzz
