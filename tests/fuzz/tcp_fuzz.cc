// The stream of a tcp link, or of an emulated one: the hello, then frames, cut anywhere.
//   input: 1 byte, how much arrives at a time; 1 byte, whose lowest bit says whether the hello is
//   genuine and whose next one whether the link is emulated; the stream
#include "fuzz.h"
#include "gradwire/transport/emulated_link.h"
#include "gradwire/transport/transport.h"

namespace gradwire::fuzz {
namespace {

const transport::LinkOptions kOptions{.rank = 0, .size = 2, .max_message = 512, .messages = 2};

void read_all(transport::Transport& transport) {
  while (const auto message = transport.peek(1)) {
    require(message->size() <= kOptions.max_message);
    require(reinterpret_cast<std::uintptr_t>(message->data()) % 8 == 0);
    const std::vector<std::byte> copy(message->begin(), message->end());
    transport.release(1);
  }
}

void answer(transport::Transport& transport) {
  const Rank peers[] = {1};
  if (transport.reserve(peers, 8).data() != nullptr) transport.commit(8);
}

// The stream ends: so does the link, with an error and not with waiting.
void listen(UniqueFd own, UniqueFd peer, Input& input, std::size_t piece) {
  const auto way = input.number<std::uint8_t>();
  const bool speaks_first = (way & 1) == 0, emulated = (way & 2) != 0;
  transport::LinkOptions options = kOptions;
  if (emulated) options.context = std::make_shared<transport::EmulatedLink>("1gbit");
  const auto transport = transport::make_transport(emulated ? "emulated" : "tcp", options);
  if (emulated) options.max_message += sizeof(transport::EmulatedLink::Flight);
  if (speaks_first) {
    say(peer, hello_of("tcp", options, 1, 0));
  } else {
    say(peer, input.rest());
    ::shutdown(peer.get(), SHUT_WR);
  }
  transport->adopt(std::move(own), 1, 0);
  while (!input.empty()) {
    say(peer, input.take(piece));
    read_all(*transport);
    answer(*transport);
  }
  peer.reset();
  read_all(*transport);
  require(emulated);  // where what comes later is not to be seen yet, nor the end behind it
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  const NoDescriptorLeft none;
  Input input(data, size);
  const std::size_t piece = 1 + input.number<std::uint8_t>();
  expect_typed([&] {
    Ends ends = socket_pair();
    listen(std::move(ends.first), std::move(ends.second), input, piece);
  });
  return 0;
}
