#include "gradwire/exec/execution/links.h"

#include <algorithm>
#include <utility>

namespace gradwire::exec {

Links::Links(transport::LinkOptions options, transport::Contexts contexts)
    : options_(std::move(options)),
      contexts_(std::move(contexts)),
      link_of_(at(options_.size), -1) {}

std::unique_ptr<transport::Transport> Links::make(std::string_view transport) const {
  transport::LinkOptions options = options_;
  const auto found = contexts_.find(transport);
  if (found != contexts_.end()) options.context = found->second;
  return transport::make_transport(transport, options);
}

void Links::offer(std::string_view transport, transport::Connection connection, Rank peer) {
  auto found = std::ranges::find_if(transports_,
                                    [&](const auto& each) { return each->name() == transport; });
  if (found == transports_.end()) {
    found = transports_.insert(found, make(transport));
    if ((*found)->doorbell() >= 0) doorbells_.push_back((*found)->doorbell());
  }
  (*found)->offer(std::move(connection), peer);
  link_of_[at(peer)] = static_cast<int>(found - transports_.begin());
}

bool Links::offered_all() const noexcept {
  return std::count(link_of_.begin(), link_of_.end(), -1) == 1;  // this rank has no link to itself
}

void Links::complete(const WaitLimit& wait_limit) {
  for (auto& each : transports_) {
    each->complete(wait_limit);
    each->close_offers();
  }
}

bool Links::in_shared_memory() const {
  return transport::transport_kind(open_->name()).sockets == transport::Sockets::kUnix;
}

bool Links::flush() {
  bool all = true;
  for (auto& each : transports_) all = each->flush() && all;
  return all;
}

bool Links::deliver() {
  bool all = true;
  for (auto& each : transports_) all = each->deliver() && all;
  return all;
}

Rank Links::full_peer() const {
  for (Rank peer = 0; peer < options_.size; ++peer)
    if (link_of_[at(peer)] >= 0 && !is_flushed(peer)) return peer;
  return kNoPeer;
}

void Links::arm() {
  for (auto& each : transports_) each->arm();
}

void Links::disarm() {
  for (auto& each : transports_) each->disarm();
}

}  // namespace gradwire::exec
