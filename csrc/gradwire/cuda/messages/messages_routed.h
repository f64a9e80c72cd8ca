// Messages that go several ways: each peer has its own, where it is known by a number of that
// way's. So NCCL within a host and the CPU transports between hosts are one.
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
    std::size_t way = 0;
    Rank rank = kNowhere;  // the peer's, on that way
    static constexpr Rank kNowhere = -1;
  };
  // All ranks have the ways of one kind in one order. `routes`: by peer; this rank's own is not
  // used.
  RoutedMessages(std::vector<std::unique_ptr<Messages>> ways, std::vector<Route> routes);

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
  void tell_losses(std::uint32_t* word) override;

 private:
  const Route& route(Rank peer) const { return routes_.at(static_cast<std::size_t>(peer)); }

  std::vector<std::unique_ptr<Messages>> ways_;
  std::vector<Route> routes_;
  std::string name_;
};

}  // namespace gradwire::cuda
