// Payloads: brings every rank's bytes to every rank, whatever their lengths, in two all_gathers:
// first the lengths, then the bytes. The bytes go in blocks that are rounded up to one of few
// sizes, so that their plans are in the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "gradwire/exec/execution/operation.h"

namespace gradwire::exec {

class Payloads {
 public:
  // Begins an exchange. `phase` is a request without arrays; its algorithm is that of both
  // all_gathers.
  void start(const Request& phase);

  // This rank's bytes, to be written before lengths(). The buffer only grows.
  std::vector<std::byte>& own() noexcept { return own_; }
  // Return the two phases. `flag` is a bit that all ranks learn from each other. bytes() throws
  // TransportError that names a rank with more than `limit` bytes.
  const Request& lengths(std::size_t own_bytes, bool flag = true);
  const Request& bytes(std::size_t limit);

  ConstBytes of(Rank rank) const;
  bool all_flagged() const;

 private:
  struct Header {
    std::uint64_t length = 0;
    std::uint64_t flag = 0;
  };
  const Header& header(Rank rank) const { return headers_[at(rank)]; }

  Request phase_;
  std::vector<std::byte> own_;
  std::vector<Header> headers_;
  std::size_t block_ = 0;  // bytes per rank
  std::vector<std::byte> blocks_;
  Array input_;
  std::vector<Array> outputs_;
};

}  // namespace gradwire::exec
