// How a buffer that lies in several arrays, end to end, is divided: into even parts, and into spans
// of the arrays. Communicators and the parameter server divide alike.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace gradwire {

// Returns where part `part` of `parts` even parts of [0, total) begins. The products do not
// overflow for any real buffer.
constexpr std::size_t even_part(std::size_t total, std::size_t part, std::size_t parts) noexcept {
  return total / parts * part + total % parts * part / parts;
}

// Calls body(array, from, to) for each array that has some of [first, last), in order: from and to
// count from the array's own start. `begins` says where each array begins, and where the last ends.
template <typename Body>
void for_each_span(const std::vector<std::size_t>& begins, std::size_t first, std::size_t last,
                   Body body) {
  if (first == last) return;
  const auto next = std::upper_bound(begins.begin(), begins.end(), first);
  for (auto i = static_cast<std::size_t>(next - begins.begin()) - 1; first < last; ++i) {
    const std::size_t end = std::min(last, begins[i + 1]);
    if (end == first) continue;  // an empty array
    body(i, first - begins[i], end - begins[i]);
    first = end;
  }
}

}  // namespace gradwire
