// RdmaDevices: the open RDMA ports of this host that a rank may use, each with the address (GID) by
// which it is reached. All communicators of a process share them. Any thread may use it, but no
// fork of the process that made it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradwire/transport/kind.h"
#include "gradwire/transport/rdma/rdma_settings.h"
#include "gradwire/transport/rdma/verbs.h"

namespace gradwire::transport {

// How one port of one device is reached.
struct RdmaAddress {
  ibv::Gid gid{};
  std::uint16_t lid = 0;
  std::uint8_t link_layer = ibv::kLinkUnspecified;
  std::uint8_t mtu = ibv::kMtu1024;  // ibv::Mtu
  // Ports on the same network reach each other: "ethernet 10.0.0.0/24" for RoCE v2,
  // "infiniband fe80000000000000". Empty where the address identifies no network (link-local).
  std::string network{};

  bool operator==(const RdmaAddress&) const = default;
};

struct RdmaPort {
  std::string device{};
  std::uint8_t number = 0;
  int gid_index = 0;
  std::uint32_t gid_type = ibv::kGidIb;
  std::uint32_t max_message = 0;
  RdmaAddress address{};
  ibv::Context* context = nullptr;
  ibv::Pd* pd = nullptr;

  // Returns "rxe0:1, RoCE v2, GID 1 (198.18.0.1), MTU 4096".
  std::string describe() const;
};

// The most ports that a rank announces.
inline constexpr std::size_t kMostRdmaPorts = 16;

class RdmaDevices final : public TransportContext {
 public:
  // Opens the ports. Throws InvalidArgument, which says what is missing (library, kernel, device,
  // permission, port, GID, lockable memory) and how to mend it.
  explicit RdmaDevices(RdmaSettings settings);
  RdmaDevices(const RdmaDevices&) = delete;
  RdmaDevices& operator=(const RdmaDevices&) = delete;

  std::vector<std::string> describe() const override;
  std::vector<std::string> networks(bool only) const override;

  const Verbs& verbs() const noexcept { return verbs_; }
  const RdmaSettings& settings() const noexcept { return settings_; }
  const std::vector<RdmaPort>& ports() const noexcept { return ports_; }  // at least one

 private:
  struct OpenedDevice {
    Owned<ibv::Context> context;
    Owned<ibv::Pd> pd;
  };
  void open(ibv::Device* device);
  void add_ports(const std::string& device, const OpenedDevice& opened);
  void add_port(RdmaPort port, const ibv::PortAttr& found);
  std::vector<ibv::GidEntry> choose_gids(const RdmaPort& port, int count) const;
  void require_lockable_memory();
  void leave_out(const std::string& what, const std::string& why);

  RdmaSettings settings_;
  const Verbs& verbs_;
  std::vector<OpenedDevice> opened_;
  std::vector<RdmaPort> ports_;
  std::string left_out_;  // devices and ports that are not used, and why
};

// Returns "infiniband" or "ethernet".
std::string_view link_layer_name(std::uint8_t layer);

// Returns the two ports that a pair of ranks uses, of the lower and of the higher rank: ports of a
// network that both are on or, failing that, the n-th port of each if these have the same link
// layer. Where there are several choices, pairs of ranks take them in turn. Returns {-1, -1} where
// there is none.
std::pair<int, int> pair_ports(std::span<const RdmaAddress> lower,
                               std::span<const RdmaAddress> higher, int lower_rank,
                               int higher_rank);

}  // namespace gradwire::transport
