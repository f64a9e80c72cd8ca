// What arrives over a sealed socket, when a program in between says it: records, and the messages
// of the handshake before them.
//   input: 1 byte, how much arrives at a time; 1 byte, what it is; 2 bytes, where; the bytes:
//   foreign ones, or those that were sealed before one of them was changed, left out or repeated
#include <string>

#include "fuzz.h"
#include "gradwire/crypto/noise.h"

namespace gradwire::fuzz {
namespace {

enum Way : std::uint8_t { kForeign, kAsSent, kFlipped, kLeftOut, kRepeated, kHandshake, kWays };

std::string_view text_of(ConstBytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string changed(std::string sent, Way way, std::size_t at) {
  if (way == kFlipped) sent[at] = static_cast<char>(sent[at] ^ 1);
  if (way == kLeftOut) sent.erase(at, 1);
  if (way == kRepeated) sent.insert(at, sent.substr(0, at + 1));
  return sent;
}

// Nothing is opened but what was sealed, in its order; all of it where nothing was changed.
void open_records(Way way, std::size_t where, std::size_t piece, std::string_view plain) {
  const crypto::Key one(crypto::bytes_of("0123456789abcdef0123456789abcdef"));
  const crypto::Key other(crypto::bytes_of("fedcba9876543210fedcba9876543210"));
  crypto::Seal sender(crypto::Cipher::kAes128Gcm, one, other);
  crypto::Seal receiver(crypto::Cipher::kAes128Gcm, other, one);
  std::string wire(plain);
  if (way != kForeign) wire = sender.records(plain.substr(0, plain.size() / 2));
  if (way != kForeign) wire += sender.records(plain.substr(plain.size() / 2));
  if (way != kForeign && !wire.empty()) wire = changed(wire, way, where % wire.size());
  std::string opened;
  bool broken = false;
  for (std::size_t at = 0; at < wire.size(); at += piece) {
    const auto more = receiver.opened(std::string_view(wire).substr(at, piece));
    require(!broken || !more);
    broken = !more;
    if (more) opened += *more;
  }
  require(way == kForeign ? opened.empty() : plain.starts_with(opened));
  if (way == kAsSent) require(!broken && opened == plain);
}

// No foreign message passes for a first one, nor for an answer.
void read_handshake(ConstBytes message) {
  const ConstBytes psk = crypto::bytes_of("0123456789abcdef0123456789abcdef");
  for (const crypto::Role role : {crypto::Role::kInitiator, crypto::Role::kResponder}) {
    crypto::Noise noise(role, {}, psk);
    if (role == crypto::Role::kInitiator) noise.write({});
    bool refused = false;
    try {
      noise.read(message);
    } catch (const TransportError&) {
      refused = true;
    }
    require(refused);
  }
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  Input input(data, size);
  const std::size_t piece = 1 + input.number<std::uint8_t>();
  const auto way = static_cast<Way>(input.number<std::uint8_t>() % kWays);
  const auto where = input.number<std::uint16_t>();
  if (way == kHandshake) {
    read_handshake(input.rest());
  } else {
    open_records(way, where, piece, text_of(input.rest()));
  }
  return 0;
}
