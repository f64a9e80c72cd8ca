// The text form. A text is not trusted: its size bounds the memory that reading it takes, and an
// error names the line.
#include <algorithm>
#include <charconv>
#include <map>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/base/op.h"
#include "gradwire/schedule/rules.h"
#include "gradwire/schedule/schedule.h"

namespace gradwire::schedule {
namespace {

constexpr std::string_view kTitle = "gradwire schedule 1";
constexpr std::string_view kBlanks = " \t\r";

std::string_view landing_name(Landing landing) {
  return landing == Landing::kCopy ? "copy" : "reduce";
}

std::string line_of(const Edge& edge) {
  std::string line = "  ";
  line.append(std::to_string(edge.src)).append(" -> ").append(std::to_string(edge.dst));
  line.append(" ").append(landing_name(edge.landing));
  line.append(" ").append(std::to_string(edge.chunks.first));
  if (edge.chunks.size() != 1) line.append(":").append(std::to_string(edge.chunks.last));
  return line;
}

std::string write(const Schedule& s, std::string_view name) {
  std::string text(kTitle);
  text.append("\n").append(name_of(s.collective)).append(" ").append(name);
  text.append(" ranks=").append(std::to_string(s.ranks));
  text.append(" chunks=").append(std::to_string(s.chunks));
  text.append(" root=").append(std::to_string(s.root)).append("\n");
  for (std::size_t round = 0; round < s.rounds.size(); ++round) {
    text.append("round ").append(std::to_string(round)).append("\n");
    for (const Edge& edge : s.rounds[round]) text.append(line_of(edge)).append("\n");
  }
  return text;
}

// Quotes the beginning of a text for an error message, with a '?' for each unprintable character.
std::string quote(std::string_view word) {
  std::string shown;
  for (char c : word.substr(0, 40)) shown += (c >= ' ' && c < '\x7f') ? c : '?';
  return "'" + shown + (word.size() > 40 ? "…'" : "'");
}

using Words = std::vector<std::string_view>;

Words split(std::string_view line) {
  line = line.substr(0, line.find('#'));
  Words words;
  for (;;) {
    const std::size_t begin = line.find_first_not_of(kBlanks);
    if (begin == std::string_view::npos) return words;
    line.remove_prefix(begin);
    const std::size_t end = std::min(line.find_first_of(kBlanks), line.size());
    words.push_back(line.substr(0, end));
    line.remove_prefix(end);
  }
}

class Parser {
 public:
  Schedule parse(std::string_view text) {
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      ++line_;
      if (const Words words = split(text.substr(0, end)); !words.empty()) read(words);
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    if (expect_ != Expect::kRounds) fail("the text ends before its header");
    return std::move(schedule_);
  }

 private:
  enum class Expect { kTitleLine, kHeader, kRounds };

  void read(const Words& words) {
    switch (expect_) {
      case Expect::kTitleLine:
        return read_title(words);
      case Expect::kHeader:
        return read_header(words);
      case Expect::kRounds:
        return words[0] == "round" ? read_round(words) : read_edge(words);
    }
  }

  void read_title(const Words& words) {
    if (words != split(kTitle)) fail("expected '" + std::string(kTitle) + "'");
    expect_ = Expect::kHeader;
  }

  void read_header(const Words& words) {
    if (words.size() < 4) fail("expected 'collective name ranks=P chunks=C [root=R]'");
    schedule_.collective = collective(words[0]);
    schedule_.name = words[1];
    std::map<std::string_view, int> fields;
    for (std::size_t i = 2; i < words.size(); ++i) read_field(words[i], fields);
    schedule_.ranks = required(fields, "ranks");
    schedule_.chunks = required(fields, "chunks");
    if (fields.contains("root")) schedule_.root = fields["root"];
    check(fault_in_name(schedule_.name));
    check(fault_in_size(schedule_.ranks, schedule_.chunks));
    check(fault_in_roles(schedule_));
    expect_ = Expect::kRounds;
  }

  void read_field(std::string_view word, std::map<std::string_view, int>& fields) {
    const std::size_t equals = word.find('=');
    const std::string_view key = word.substr(0, equals);
    if (equals == std::string_view::npos || (key != "ranks" && key != "chunks" && key != "root"))
      fail("unknown field " + quote(word) + "; use ranks=, chunks=, root=");
    if (!fields.emplace(key, number(word.substr(equals + 1))).second)
      fail("field " + quote(key) + " given twice");
  }

  void read_round(const Words& words) {
    const auto next = static_cast<int>(schedule_.rounds.size());
    if (words.size() != 2 || number(words[1]) != next)
      fail("expected 'round " + std::to_string(next) + "'");
    if (next >= kMaxRounds) fail("more than " + std::to_string(kMaxRounds) + " rounds");
    schedule_.rounds.emplace_back();
  }

  void read_edge(const Words& words) {
    if (words.size() != 5 || words[1] != "->")
      fail("expected 'round N' or 'src -> dst copy|reduce chunk[:end]', not " + quote(words[0]));
    if (schedule_.rounds.empty()) fail("an edge stands before 'round 0'");
    const Edge edge{number(words[0]), number(words[2]), range(words[4]), landing(words[3])};
    check(fault_in_edge(schedule_, static_cast<int>(schedule_.rounds.size()) - 1, edge));
    schedule_.rounds.back().push_back(edge);
  }

  Collective collective(std::string_view word) {
    try {
      return parse_collective(word.substr(0, 40));
    } catch (const InvalidArgument&) {
      fail("unknown collective " + quote(word));
    }
  }

  Landing landing(std::string_view word) {
    for (Landing each : {Landing::kCopy, Landing::kReduce})
      if (word == landing_name(each)) return each;
    fail("expected 'copy' or 'reduce', not " + quote(word));
  }

  ChunkRange range(std::string_view word) {
    const std::size_t colon = word.find(':');
    const int first = number(word.substr(0, colon));
    if (colon == std::string_view::npos) return {first, first + 1};
    return {first, number(word.substr(colon + 1))};
  }

  int required(const std::map<std::string_view, int>& fields, std::string_view key) {
    const auto found = fields.find(key);
    if (found == fields.end()) fail("the header lacks " + std::string(key) + "=");
    return found->second;
  }

  // Returns a whole number of at most kLargest. That exceeds every limit, so callers report the
  // number as out of range, and `first + 1` does not overflow.
  int number(std::string_view word) {
    int value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size() || value < 0 || value > kLargest)
      fail("expected a whole number up to " + std::to_string(kLargest) + ", not " + quote(word));
    return value;
  }

  void check(const std::string& fault) {
    if (!fault.empty()) fail(fault);
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw ScheduleError("schedule text, line " + std::to_string(line_) + ": " + why);
  }

  static constexpr int kLargest = 1 << 30;
  Expect expect_ = Expect::kTitleLine;
  int line_ = 0;
  Schedule schedule_;
};

}  // namespace

std::string to_text(const Schedule& schedule) {
  require_no_fault(fault_in_name(schedule.name));
  return write(schedule, schedule.name);
}

Schedule parse_schedule(std::string_view text) { return Parser().parse(text); }

std::uint64_t digest(const Schedule& schedule) {
  return Fnv1a().text(write(schedule, "")).digest();
}

}  // namespace gradwire::schedule
