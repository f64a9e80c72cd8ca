// Frames of a data link, as an operation checks them: two ranks run one over sockets, and whoever
// sits between them alters, byte by byte, what rank 1 sends.
//   input: 1 byte, which operation; then (2 bytes position, 1 byte to xor) each
#include <array>
#include <numeric>

#include "fuzz.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/exec/control/failure.h"
#include "gradwire/exec/execution/execution.h"
#include "gradwire/exec/execution/point_to_point.h"
#include "gradwire/schedule/generators.h"
#include "gradwire/schedule/verify.h"

namespace gradwire::fuzz {
namespace {

constexpr std::size_t kElements = 100;
constexpr std::uint32_t kCommunicator = 7;
using Values = std::vector<float>;

transport::LinkOptions options_of(Rank rank) {
  return {.rank = rank, .size = 2, .max_message = 256, .messages = 4};
}

struct Edit {
  std::size_t at = 0;
  std::byte mask{};
};

std::vector<Edit> read_edits(Input& input) {
  std::vector<Edit> edits;
  while (!input.empty()) {
    const std::size_t at = input.number<std::uint16_t>() % 1024;
    edits.push_back({at, static_cast<std::byte>(input.number<std::uint8_t>())});
  }
  return edits;
}

// One rank's link and the middle of the wire at its other end.
struct Side {
  explicit Side(Rank rank) : links(options_of(rank)) {
    auto [own, other] = socket_pair();
    wire = std::move(other);
    const Rank peer = 1 - rank;
    say(wire, hello_of("tcp", options_of(peer), peer, rank));
    links.offer("tcp", std::move(own), peer);
    links.complete(Deadline::after(0));
    hello = hello_of("tcp", options_of(rank), rank, peer).size();
  }

  exec::Links links;
  exec::TrafficCounter traffic;
  UniqueFd wire;
  std::size_t hello = 0;   // bytes in front of the frames
  std::size_t passed = 0;  // bytes of frames that went on
};

// Moves what one side has sent on to the other; whether that was anything.
bool pass_on(Side& from, Side& to, const std::vector<Edit>& edits) {
  std::array<std::byte, 4096> buffer;
  const ssize_t got = ::recv(from.wire.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (got <= 0) return false;
  Bytes bytes(buffer.data(), static_cast<std::size_t>(got));
  const std::size_t skipped = std::min(from.hello, bytes.size());
  from.hello -= skipped;
  bytes = bytes.subspan(skipped);
  for (const Edit& edit : edits)
    if (edit.at >= from.passed && edit.at < from.passed + bytes.size())
      bytes[edit.at - from.passed] ^= edit.mask;
  from.passed += bytes.size();
  say(to.wire, bytes);
  return true;
}

template <typename Advance>
void run(const std::vector<Edit>& edits, Advance advance) {
  std::array<Side, 2> sides{Side(0), Side(1)};
  bool moved = true;
  while (moved) {
    moved = advance(1, sides[1]);
    moved |= pass_on(sides[1], sides[0], edits);
    moved |= advance(0, sides[0]);
    moved |= pass_on(sides[0], sides[1], {});
  }
}

exec::Plan plan_of(std::string_view algorithm, std::string_view codec, Rank rank) {
  schedule::Recipe recipe;
  recipe.algorithm = algorithm;
  recipe.ranks = 2;
  const auto schedule = schedule::generate(recipe);
  exec::Binding binding;
  binding.spec.counts = binding.counts = {kElements};
  binding.spec.algorithm = algorithm;
  binding.spec.codec = codec;
  binding.rank = rank;
  binding.codec = codec::make_codec(codec);
  binding.in_tree = schedule::verify(schedule).in_tree;
  binding.max_message = options_of(rank).max_message;
  return {schedule, binding};
}

Values values_of(Rank rank) {
  Values values(kElements);
  std::iota(values.begin(), values.end(), static_cast<float>(rank));
  return values;
}

void collective(std::string_view algorithm, std::string_view codec, bool exact,
                const std::vector<Edit>& edits) {
  const std::array plans{plan_of(algorithm, codec, 0), plan_of(algorithm, codec, 1)};
  std::array values{values_of(0), values_of(1)};
  std::array arrays{reinterpret_cast<std::byte*>(values[0].data()),
                    reinterpret_cast<std::byte*>(values[1].data())};
  std::array<exec::Execution, 2> executions;
  for (Rank rank : {0, 1}) {
    const auto at = static_cast<std::size_t>(rank);
    exec::Execution::Call call;
    call.plan = &plans[at];
    call.arrays = {&arrays[at], 1};
    call.rank = rank;
    call.communicator = kCommunicator;
    call.operation = 3;
    executions[at].start(call);
  }
  const codec::FloatEnvironment environment;
  run(edits, [&](std::size_t rank, Side& side) {
    return !executions[rank].done() && executions[rank].advance(side.links, side.traffic);
  });
  if (!edits.empty()) return;
  require(executions[0].done() && executions[1].done() && values[0] == values[1]);
  if (!exact) return;
  for (std::size_t i = 0; i < kElements; ++i)
    require(values[0][i] == static_cast<float>(2 * i + 1));
}

void transfer(bool packed, const std::vector<Edit>& edits) {
  std::array values{values_of(0), values_of(1)};
  std::array<exec::PointToPoint, 2> transfers{exec::PointToPoint(0, 2, kCommunicator),
                                              exec::PointToPoint(1, 2, kCommunicator)};
  const auto transfer_of = [&](std::size_t rank) {
    exec::Transfer made;
    made.work = std::make_shared<Work>();
    made.data = reinterpret_cast<std::byte*>(values[rank].data());
    made.size = kElements * sizeof(float);
    if (packed) made.packed_as = DType::kFloat32;
    made.peer = static_cast<Rank>(1 - rank);
    return made;
  };
  transfers[0].receive(transfer_of(0));
  transfers[1].send(transfer_of(1));
  run(edits, [&](std::size_t rank, Side& side) {
    return transfers[rank].advance(side.links, side.traffic);
  });
  if (edits.empty()) require(transfers[0].idle() && values[0] == values[1]);
}

void operation(unsigned kind, const std::vector<Edit>& edits) {
  constexpr std::array kAlgorithms = {"ring", "direct", "star"};
  constexpr std::array kCodecs = {"none",
                                  "fp16",
                                  "bf16",
                                  "int8:block=32",
                                  "onebit:block=32",
                                  "threshold:tau=50",
                                  "topk:density=0.1",
                                  "lossless"};
  constexpr unsigned kExact = 3;  // of integers this small
  if (kind % 4 == 3) return transfer(kind / 4 % 2 == 1, edits);
  const unsigned codec = kind / 4 % kCodecs.size();
  const bool exact = codec < kExact || kCodecs[codec] == std::string_view("lossless");
  collective(kAlgorithms[kind % 4], kCodecs[codec], exact, edits);
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  const NoDescriptorLeft none;
  Input input(data, size);
  const auto kind = input.number<std::uint8_t>();
  try {
    expect_typed([&] { operation(kind, read_edits(input)); });
  } catch (const gradwire::exec::Disagreement&) {  // which the communicator turns into an error
  }
  return 0;
}
