// Commands of a coordinator to the vectors that shards hold (Sandblaster: Dean et al. 2012, section
// 4.2), their results, and the wire format of both. Bytes from the network are untrusted until
// parse_commands() or parse_results() has returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "gradwire/base/types.h"

namespace gradwire::serve {

// The vector that pulls read.
inline constexpr std::string_view kParameters = "w";

inline constexpr std::size_t kMostVectorName = 64;  // characters
inline constexpr std::size_t kMostCommands = 1024;  // of one request
inline constexpr std::size_t kMostItems = 8192;     // pairs, terms or pushes of one command

// The name of a staged push within its batch: its replica, and its number there.
struct PushName {
  std::uint64_t replica = 0, sequence = 0;
  auto operator<=>(const PushName&) const = default;
};

// The name of a staged push, as its first frame carries it.
struct StagedPush {
  std::uint64_t batch = 0;
  PushName name{};
};
static_assert(sizeof(StagedPush) == 24 && std::is_trivially_copyable_v<StagedPush>);

namespace command {

struct Dots {  // result: for each pair, the exact sum of its block sums
  std::vector<std::pair<std::string, std::string>> pairs{};
};
struct Absmax {  // result: the largest absolute value
  std::string name{};
};
struct Abssum {  // result: the exact sum of the block sums of absolute values
  std::string name{};
};
struct WeightedSum {  // target = Σ coefficient·source, in float64, in this order, rounded once
  std::string target{};
  std::vector<std::pair<double, std::string>> terms{};
};
struct CopyVector {
  std::string target{}, source{};
};
struct Drop {
  std::string name{};
};
struct ListNames {};  // result: all names
struct FoldPushes {   // target = Σ staged pushes, in float64, in this order, rounded once
  std::string target{};
  std::uint64_t batch = 0;
  std::vector<PushName> pushes{};
};
struct Discard {
  bool all = false;  // whatever the batch
  std::uint64_t batch = 0;
};

}  // namespace command

// The order is that of the wire.
using Command = std::variant<command::Dots, command::Absmax, command::Abssum, command::WeightedSum,
                             command::CopyVector, command::Drop, command::ListNames,
                             command::FoldPushes, command::Discard>;

// An exact sum is a list of numbers that add up to it, or a single number that is not finite.
struct CommandResult {
  std::vector<std::vector<double>> numbers{};
  std::vector<std::string> names{};
  bool operator==(const CommandResult&) const = default;
};

// Returns whether only a coordinator may give this command.
bool changes_vectors(const Command& command) noexcept;

std::vector<std::byte> pack(std::span<const Command> commands);
std::vector<std::byte> pack(std::span<const CommandResult> results);
// Throw InvalidArgument for bytes that pack() does not write, for names that no vector can have and
// for more than may be asked at a time.
std::vector<Command> parse_commands(ConstBytes bytes);
std::vector<CommandResult> parse_results(ConstBytes bytes);

// Throws InvalidArgument for a name that no vector can have: those have 1 to kMostVectorName
// printable ASCII characters.
void check_vector_name(std::string_view name);

}  // namespace gradwire::serve
