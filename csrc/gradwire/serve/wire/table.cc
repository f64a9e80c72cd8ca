#include "gradwire/serve/wire/table.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"
#include "gradwire/codec/codec.h"
#include "gradwire/serve/shard/update_rule.h"
#include "gradwire/serve/vectors/block_sums.h"

namespace gradwire::serve {
namespace {

constexpr std::uint64_t kMostElements = std::uint64_t{1} << 36;
constexpr std::uint32_t kMostShards = 1 << 16;
constexpr std::size_t kMostCodecs = 256;
constexpr std::string_view kTitle = "gradwire parameters 1";

std::string shape_text(const Parameter& parameter) {
  std::string text;
  for (const std::uint64_t side : parameter.shape)
    (text += text.empty() ? "" : "x") += std::to_string(side);
  return text.empty() ? "scalar" : text;
}

std::string described(const Parameter& parameter) {
  return "'" + parameter.name + "' (" + shape_text(parameter) + ")";
}

[[noreturn]] void refuse(std::string_view line) {
  throw InvalidArgument(
      str_cat("a table of parameters has an impossible line: '", line.substr(0, 80), "'"));
}

std::uint64_t number(std::string_view text, std::string_view line) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) refuse(line);
  return value;
}

// Takes the text before the next `end` off the front.
std::string_view take(std::string_view& rest, char end) {
  const std::string_view front = rest.substr(0, rest.find(end));
  rest.remove_prefix(std::min(rest.size(), front.size() + 1));
  return front;
}

Parameter parse_parameter(std::string_view rest, std::string_view line) {
  Parameter parameter;
  std::string_view sides = take(rest, ' ');
  if (sides != "scalar")
    while (!sides.empty()) parameter.shape.push_back(number(take(sides, 'x'), line));
  parameter.name = rest;
  return parameter;
}

void parse_line(std::string_view line, ParameterTable& table) {
  std::string_view rest = line;
  const std::string_view key = take(rest, ' ');
  if (key == "rule")
    table.rule = rest;
  else if (key == "codec")
    table.codecs.emplace_back(rest);
  else if (key == "shards")
    table.shards = static_cast<std::uint32_t>(std::min<std::uint64_t>(number(rest, line), ~0U));
  else if (key == "atomic")
    table.atomic_push = rest == "push";
  else if (key == "divide")
    table.divide = rest == "yes";
  else if (key == "staleness")
    table.max_staleness = number(rest, line);
  else if (key == "dtype" && rest == name_of(DType::kFloat64))
    table.dtype = DType::kFloat64;
  else if (key == "parameter")
    table.parameters.push_back(parse_parameter(rest, line));
  else
    refuse(line);
}

void check_codecs(const std::vector<std::string>& codecs) {
  if (codecs.empty() || codecs.front() != "none" || codecs.size() > kMostCodecs)
    throw InvalidArgument("a table's codecs must begin with none, and be at most 256");
  for (const std::string& each : codecs) {
    const auto codec = codec::make_codec(each);
    if (codec->name() != each || codec->combine() == codec::Combine::kCompound)
      throw InvalidArgument("codec '" + each + "' can't be used with a parameter server");
  }
}

// Vectors are cut at blocks, and nothing is applied where pushes are staged.
void check_staged(const ParameterTable& table) {
  if (table.dtype != DType::kFloat32 && (!table.staged() || table.codecs.size() > 1))
    throw InvalidArgument(str_cat("parameters of ", name_of(table.dtype),
                                  " need the rule staged, and codec none alone"));
  if (!table.staged()) return;
  if (table.divide || table.max_staleness != ParameterTable{}.max_staleness)
    throw InvalidArgument(
        "the rule staged applies no push: divide and max_staleness mean nothing to it");
  const std::uint64_t block = block_of(table.elements());
  if ((table.elements() + block - 1) / block < table.shards)
    throw InvalidArgument(str_cat(table.elements(), " elements lie in blocks of ", block,
                                  ", which can't be cut into ", table.shards, " shards"));
}

}  // namespace

// Saturates, so that check() sees what is too large.
std::uint64_t Parameter::elements() const noexcept {
  std::uint64_t product = 1;
  for (const std::uint64_t side : shape)
    product = side != 0 && product > kMostElements / side ? kMostElements + 1 : product * side;
  return std::ranges::find(shape, std::uint64_t{0}) != shape.end() ? 0 : product;
}

std::uint64_t ParameterTable::elements() const noexcept {
  std::uint64_t sum = 0;
  for (const Parameter& each : parameters) sum = std::min(sum + each.elements(), kMostElements + 1);
  return sum;
}

bool ParameterTable::staged() const noexcept { return rule == kStaged; }

std::uint16_t ParameterTable::index_of(const std::string& codec) const {
  const auto found = std::ranges::find(codecs, codec);
  if (found != codecs.end()) return static_cast<std::uint16_t>(found - codecs.begin());
  throw InvalidArgument("codec '" + codec + "' was not named when the servers were joined");
}

std::string ParameterTable::text() const {
  std::string out(kTitle);
  out += "\nrule " + rule + "\nshards " + std::to_string(shards);
  out += "\natomic " + std::string(atomic_push ? "push" : "frame");
  out += "\ndivide " + std::string(divide ? "yes" : "no");
  out += "\nstaleness " + std::to_string(max_staleness);
  if (dtype != DType::kFloat32) out += "\ndtype " + std::string(name_of(dtype));
  for (const std::string& each : codecs) out += "\ncodec " + each;
  for (const Parameter& each : parameters)
    out += "\nparameter " + shape_text(each) + " " + each.name;
  return out + "\n";
}

std::uint64_t ParameterTable::digest() const { return Fnv1a().text(text()).digest(); }

std::uint16_t ParameterTable::mark() const {
  return static_cast<std::uint16_t>(std::max<std::uint64_t>(digest() & 0xFFFF, 1));
}

ParameterTable ParameterTable::parse(std::string_view text) {
  ParameterTable table;
  table.codecs.clear();
  std::string_view rest = text;
  if (take(rest, '\n') != kTitle) refuse(text.substr(0, text.find('\n')));
  while (!rest.empty()) parse_line(take(rest, '\n'), table);
  table.check();
  if (table.text() != text) throw InvalidArgument("a table of parameters is not in its own form");
  return table;
}

void ParameterTable::check() const {
  if (parameters.empty()) throw InvalidArgument("a parameter server needs a parameter");
  if (shards < 1 || shards > kMostShards || elements() < shards || elements() > kMostElements)
    throw InvalidArgument(str_cat(elements(), " elements can't be cut into ", shards, " shards"));
  std::set<std::string_view> names;
  for (const Parameter& each : parameters)
    if (each.name.find('\n') != std::string::npos || !names.insert(each.name).second)
      throw InvalidArgument("parameter '" + each.name +
                            "' has a name with a line break, or that of another one");
  if (make_rule(rule).name != rule)
    throw InvalidArgument("rule '" + rule + "' is not in its own form");
  check_codecs(codecs);
  check_staged(*this);
  if (const std::size_t bytes = text().size(); bytes > kMostTableText)
    throw InvalidArgument(str_cat("names and shapes of the parameters take ", bytes,
                                  " bytes, and at most ", kMostTableText, " can be sent"));
}

std::string difference(const ParameterTable& theirs, const ParameterTable& ours) {
  if (theirs.shards != ours.shards) return str_cat(theirs.shards, " shards, not ", ours.shards);
  if (theirs.rule != ours.rule) return "rule '" + theirs.rule + "', not '" + ours.rule + "'";
  if (theirs.dtype != ours.dtype)
    return std::string(name_of(theirs.dtype)) + ", not " + std::string(name_of(ours.dtype));
  if (theirs.codecs != ours.codecs) return "the codecs differ";
  const std::size_t common = std::min(theirs.parameters.size(), ours.parameters.size());
  for (std::size_t i = 0; i < common; ++i)
    if (theirs.parameters[i] != ours.parameters[i])
      return str_cat("parameter ", i, " is ", described(theirs.parameters[i]), ", not ",
                     described(ours.parameters[i]));
  if (theirs.parameters.size() != ours.parameters.size())
    return str_cat(theirs.parameters.size(), " parameters, not ", ours.parameters.size());
  return "atomic, divide or max_staleness differ";
}

}  // namespace gradwire::serve
