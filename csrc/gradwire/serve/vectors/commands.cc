#include "gradwire/serve/vectors/commands.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "gradwire/base/error.h"

namespace gradwire::serve {
namespace {

class Writer {
 public:
  template <typename... Fields>
  void operator()(const Fields&... fields) {
    (write(fields), ...);
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void raw(const void* data, std::size_t size) {
    const auto* const from = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), from, from + size);
  }
  template <typename Number>
    requires std::is_arithmetic_v<Number>
  void write(Number number) {
    raw(&number, sizeof number);
  }
  void write(const std::string& text) {
    write(static_cast<std::uint32_t>(text.size()));
    raw(text.data(), text.size());
  }
  void write(const PushName& name) { (*this)(name.replica, name.sequence); }
  template <typename A, typename B>
  void write(const std::pair<A, B>& pair) {
    (*this)(pair.first, pair.second);
  }
  template <typename Each>
  void write(const std::vector<Each>& list) {
    write(static_cast<std::uint32_t>(list.size()));
    for (const Each& each : list) write(each);
  }

  std::vector<std::byte> bytes_;
};

// Reads hostile bytes. What it makes of them is no larger than a few times what they are.
class Reader {
 public:
  explicit Reader(ConstBytes bytes) : rest_(bytes) {}
  template <typename... Fields>
  void operator()(Fields&... fields) {
    (read(fields), ...);
  }
  std::size_t count(std::size_t most) {
    std::uint32_t items = 0;
    read(items);
    // Each takes a byte or more.
    if (items > rest_.size() || items > most)
      throw InvalidArgument(
          str_cat("it has ", items, " items in a list, and at most ", most, " are allowed"));
    return items;
  }
  void end() const {
    if (!rest_.empty()) throw InvalidArgument("it is longer than what it says");
  }

 private:
  ConstBytes take(std::size_t size) {
    if (size > rest_.size()) throw InvalidArgument("it is cut short");
    const ConstBytes front = rest_.first(size);
    rest_ = rest_.subspan(size);
    return front;
  }
  template <typename Number>
    requires std::is_arithmetic_v<Number>
  void read(Number& number) {
    std::memcpy(&number, take(sizeof number).data(), sizeof number);
  }
  void read(bool& flag) {
    std::uint8_t byte = 0;
    read(byte);
    if (byte > 1) throw InvalidArgument("a flag is neither 0 nor 1");
    flag = byte != 0;
  }
  void read(std::string& text) {
    std::uint32_t size = 0;
    read(size);
    const ConstBytes bytes = take(std::min<std::size_t>(size, kMostVectorName + 1));
    text.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    check_vector_name(text);
  }
  void read(PushName& name) { (*this)(name.replica, name.sequence); }
  template <typename A, typename B>
  void read(std::pair<A, B>& pair) {
    (*this)(pair.first, pair.second);
  }
  template <typename Each>
  void read(std::vector<Each>& list) {
    list.resize(count(kMostItems));
    for (Each& each : list) read(each);
  }

  ConstBytes rest_;
};

// What a command has on the wire, in this order, for Writer and Reader alike.
void fields(auto& stream, auto& given) {
  using Given = std::remove_cvref_t<decltype(given)>;
  if constexpr (std::is_same_v<Given, command::Dots>)
    stream(given.pairs);
  else if constexpr (std::is_same_v<Given, command::WeightedSum>)
    stream(given.target, given.terms);
  else if constexpr (std::is_same_v<Given, command::CopyVector>)
    stream(given.target, given.source);
  else if constexpr (std::is_same_v<Given, command::FoldPushes>)
    stream(given.target, given.batch, given.pushes);
  else if constexpr (std::is_same_v<Given, command::Discard>)
    stream(given.all, given.batch);
  else if constexpr (!std::is_same_v<Given, command::ListNames>)
    stream(given.name);
}

// Reads the alternative with number `kind` of the variant.
template <std::size_t... Kinds>
Command read_command(Reader& reader, std::uint8_t kind, std::index_sequence<Kinds...>) {
  Command read;
  const auto take = [&]<std::size_t Kind>(std::integral_constant<std::size_t, Kind>) {
    if (kind != Kind) return false;
    fields(reader, read.emplace<Kind>());
    return true;
  };
  if (!(take(std::integral_constant<std::size_t, Kinds>()) || ...))
    throw InvalidArgument(str_cat("there is no command ", kind));
  return read;
}

}  // namespace

void check_vector_name(std::string_view name) {
  const auto printable = [](char c) { return c >= ' ' && c <= '~'; };
  if (name.empty() || name.size() > kMostVectorName || !std::ranges::all_of(name, printable))
    throw InvalidArgument(
        str_cat("a vector's name has 1 to ", kMostVectorName, " printable ASCII characters"));
}

bool changes_vectors(const Command& command) noexcept {
  return !std::holds_alternative<command::Dots>(command) &&
         !std::holds_alternative<command::Absmax>(command) &&
         !std::holds_alternative<command::Abssum>(command) &&
         !std::holds_alternative<command::ListNames>(command);
}

std::vector<std::byte> pack(std::span<const Command> commands) {
  Writer writer;
  writer(static_cast<std::uint32_t>(commands.size()));
  for (const Command& each : commands) {
    writer(static_cast<std::uint8_t>(each.index()));
    std::visit([&](const auto& given) { fields(writer, given); }, each);
  }
  return writer.take();
}

std::vector<Command> parse_commands(ConstBytes bytes) {
  Reader reader(bytes);
  std::vector<Command> commands;
  for (std::size_t left = reader.count(kMostCommands); left > 0; --left) {
    std::uint8_t kind = 0;
    reader(kind);
    constexpr auto kKinds = std::make_index_sequence<std::variant_size_v<Command>>();
    commands.push_back(read_command(reader, kind, kKinds));
  }
  reader.end();
  return commands;
}

std::vector<std::byte> pack(std::span<const CommandResult> results) {
  Writer writer;
  writer(static_cast<std::uint32_t>(results.size()));
  for (const CommandResult& each : results) writer(each.numbers, each.names);
  return writer.take();
}

std::vector<CommandResult> parse_results(ConstBytes bytes) {
  Reader reader(bytes);
  std::vector<CommandResult> results(reader.count(kMostCommands));
  for (CommandResult& each : results) reader(each.numbers, each.names);
  reader.end();
  return results;
}

}  // namespace gradwire::serve
