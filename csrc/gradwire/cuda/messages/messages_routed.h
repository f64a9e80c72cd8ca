// Messages over several transports. Each peer has a route: one of the transports, and the peer's
// rank there. So NCCL within a host and the CPU transports between hosts act as one.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gradwire/cuda/messages/messages.h"

namespace gradwire::cuda {

class RoutedMessages final : public Messages {
 public:
  struct Route {
    std::size_t transport = 0;
    Rank rank = kNowhere;  // the peer's rank in that transport
    static constexpr Rank kNowhere = -1;
  };
  // All ranks list the same kinds of transport in the same order, the one between hosts first.
  // `routes` is indexed by peer; this rank's own entry is not used.
  RoutedMessages(std::vector<std::unique_ptr<Messages>> transports, std::vector<Route> routes);

  std::string_view name() const noexcept override { return name_; }
  void begin() override;
  void send(const std::byte* data, std::size_t bytes, Rank peer,
            std::span<const Slotted> layout) override;
  void receive(std::byte* data, std::size_t bytes, Rank peer,
               std::span<const Slotted> layout) override;
  void end(Stream stream) override;
  void check() override;
  void abort() noexcept override;
  bool rest() noexcept override;
  void set_loss_word(std::uint32_t* word) override;

 private:
  const Route& route(Rank peer) const { return routes_.at(static_cast<std::size_t>(peer)); }

  std::vector<std::unique_ptr<Messages>> transports_;
  std::vector<Route> routes_;
  std::string name_;
};

}  // namespace gradwire::cuda
