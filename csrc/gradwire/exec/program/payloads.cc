#include "gradwire/exec/program/payloads.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "gradwire/base/error.h"
#include "gradwire/exec/control/identity.h"

namespace gradwire::exec {
namespace {

// Rounds up by at most 1/32 (64 bytes where that is more), so that lengths which change a little
// from call to call share a plan.
std::size_t round_up(std::size_t bytes) {
  const std::size_t step = std::max<std::size_t>(64, std::bit_floor(bytes) / 32);
  return (bytes + step - 1) / step * step;
}

}  // namespace

void Payloads::start(const Request& phase) {
  phase_ = phase;
  headers_.resize(at(phase.size));
  outputs_.resize(headers_.size());
  phase_.inputs = {&input_, 1};
  phase_.outputs = outputs_;
}

const Request& Payloads::lengths(std::size_t own_bytes, bool flag) {
  headers_[at(phase_.rank)] = {own_bytes, flag};
  for (std::size_t r = 0; r < outputs_.size(); ++r)
    outputs_[r] = {reinterpret_cast<std::byte*>(&headers_[r]), sizeof(Header)};
  input_ = outputs_[at(phase_.rank)];
  return phase_;
}

const Request& Payloads::bytes(std::size_t limit) {
  std::size_t longest = 0;
  for (Rank r = 0; r < phase_.size; ++r) {
    if (header(r).length > limit)
      throw TransportError(name_of(phase_.rank) + ": rank " + std::to_string(r) +
                               " announced a payload of " + std::to_string(header(r).length) +
                               " bytes; its codec makes " + std::to_string(limit) + " at most",
                           r);
    longest = std::max<std::size_t>(longest, header(r).length);
  }
  block_ = round_up(longest);
  const std::size_t total = block_ * outputs_.size();
  if (blocks_.size() < total) blocks_.resize(total);
  for (std::size_t r = 0; r < outputs_.size(); ++r)
    outputs_[r] = {blocks_.data() + r * block_, block_};
  input_ = outputs_[at(phase_.rank)];
  const std::size_t used = header(phase_.rank).length;
  if (used > 0) std::memcpy(input_.data, own_.data(), used);
  std::memset(input_.data + used, 0, block_ - used);
  return phase_;
}

ConstBytes Payloads::of(Rank rank) const {
  return ConstBytes(blocks_).subspan(at(rank) * block_, header(rank).length);
}

bool Payloads::all_flagged() const {
  return std::all_of(headers_.begin(), headers_.end(),
                     [](const Header& each) { return each.flag == 1; });
}

}  // namespace gradwire::exec
