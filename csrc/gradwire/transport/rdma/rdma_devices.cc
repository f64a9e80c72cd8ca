#include "gradwire/transport/rdma/rdma_devices.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "gradwire/base/error.h"
#include "gradwire/transport/rdma/rdma_addresses.h"

namespace gradwire::transport {
namespace {

constexpr int kInfiniBandTransport = 0;        // ibv::Device::transport_type; others: iWARP, ...
constexpr std::size_t kLockable = 64UL << 20;  // bytes that registered staging may take
constexpr const char* kWithout = "or do without: GRADWIRE_TRANSPORT=shm,tcp";

[[noreturn]] void refuse(const std::string& why) { throw InvalidArgument(why); }

// Returns the ibv::Mtu for a size in bytes that a port can have.
int mtu_of(int bytes) {
  return std::bit_width(static_cast<unsigned>(bytes) / 256) - 1 + ibv::kMtu256;
}

// Returns the preference for one of a port's addresses where the user chose none; the highest wins.
int preference(const ibv::GidEntry& entry) {
  if (entry.gid_type != ibv::kGidRoceV2) return 0;
  if (is_ipv4(entry.gid)) return 3;
  return is_link_local(entry.gid) ? 1 : 2;
}

RdmaPort with_gid(RdmaPort port, const ibv::GidEntry& entry) {
  port.gid_index = static_cast<int>(entry.gid_index);
  port.gid_type = entry.gid_type;
  port.address.gid = entry.gid;
  port.address.network = port.address.link_layer == ibv::kLinkEthernet
                             ? ethernet_network(entry.gid)
                             : infiniband_network(entry.gid);
  return port;
}

std::string open_failed(const ibv::Device& device, int error) {
  const std::string node = "/dev/infiniband/" + std::string(device.dev_name.data());
  if (error != EACCES && error != EPERM && error != ENOENT)
    return system_message("it does not open", error);
  return system_message("it does not open", error) + ", this user needs read and write access to " +
         node + " (in a container: --device=/dev/infiniband)";
}

}  // namespace

std::string_view link_layer_name(std::uint8_t layer) {
  return layer == ibv::kLinkEthernet ? "ethernet" : "infiniband";
}

std::string RdmaPort::describe() const {
  const std::string where = device + ":" + std::to_string(number);
  const std::string mtu = ", MTU " + std::to_string(128 << address.mtu);
  if (address.link_layer == ibv::kLinkInfiniBand)
    return str_cat(where, ", InfiniBand, LID ", address.lid, mtu);
  return str_cat(where, (gid_type == ibv::kGidRoceV2 ? ", RoCE v2, GID " : ", RoCE v1, GID "),
                 gid_index, " (", gid_text(address.gid), ")", mtu);
}

RdmaDevices::RdmaDevices(RdmaSettings settings)
    : settings_(std::move(settings)), verbs_(Verbs::load(settings_.library)) {
  int count = 0;
  ibv::Device** list = verbs_.get_device_list(&count);
  if (list == nullptr)
    refuse(errno == ENOSYS ? "this kernel has no RDMA support (module ib_uverbs): load it, " +
                                 std::string(kWithout)
                           : system_message("the RDMA devices cannot be listed", errno));
  for (int i = 0; i < count; ++i) open(list[i]);
  verbs_.free_device_list(list);
  if (count == 0)
    refuse(str_cat(
        "there is no RDMA device (no adapter, no driver, or it is not in this network namespace): "
        "see ibv_devices, ",
        kWithout));
  if (ports_.empty()) refuse("no RDMA port can be used: " + left_out_);
  if (ports_.size() > kMostRdmaPorts) ports_.resize(kMostRdmaPorts);
  require_lockable_memory();
}

std::vector<std::string> RdmaDevices::describe() const {
  std::vector<std::string> lines;
  for (const RdmaPort& port : ports_) lines.push_back(port.describe());
  return lines;
}

std::vector<std::string> RdmaDevices::networks(bool only) const {
  std::vector<std::string> names;
  for (const RdmaPort& port : ports_) {
    if (!port.address.network.empty()) names.push_back(port.address.network);
    if (only)
      names.push_back(std::string(link_layer_name(port.address.link_layer)) + ", any network");
  }
  return names;
}

void RdmaDevices::leave_out(const std::string& what, const std::string& why) {
  left_out_ += (left_out_.empty() ? "" : "; ") + what + ": " + why;
}

void RdmaDevices::open(ibv::Device* device) {
  const std::string name(device->name.data());
  if (device->transport_type != kInfiniBandTransport)
    return leave_out(name, "it is neither InfiniBand nor RoCE");
  Owned<ibv::Context> context(verbs_.open_device(device), verbs_.close_device);
  if (!context) return leave_out(name, open_failed(*device, errno));
  Owned<ibv::Pd> pd(verbs_.alloc_pd(context.get()), verbs_.dealloc_pd);
  if (!pd) return leave_out(name, system_message("ibv_alloc_pd", errno));
  opened_.push_back({std::move(context), std::move(pd)});
  const std::size_t before = ports_.size();
  add_ports(name, opened_.back());
  if (ports_.size() == before) opened_.pop_back();
}

void RdmaDevices::add_ports(const std::string& device, const OpenedDevice& opened) {
  ibv::DeviceAttr device_found{};
  if (const int error = verbs_.query_device(opened.context.get(), &device_found); error != 0)
    return leave_out(device, system_message("ibv_query_device", error));
  if (device_found.phys_port_cnt == 0) leave_out(device, "it has no port");
  for (int number = 1; number <= device_found.phys_port_cnt; ++number) {
    RdmaPort port;
    port.device = device;
    port.number = static_cast<std::uint8_t>(number);
    port.context = opened.context.get();
    port.pd = opened.pd.get();
    const std::string name = device + ":" + std::to_string(number);
    ibv::PortAttr found{};
    if (const int error = verbs_.query_port(port.context, port.number, &found); error != 0)
      leave_out(name, system_message("ibv_query_port", error));
    else if (!hca_matches(settings_.hca, device, number))
      leave_out(name, "GRADWIRE_IB_HCA=" + settings_.hca + " does not name it");
    else if (found.state != ibv::kPortActive)
      leave_out(name, "its link is down");
    else
      add_port(std::move(port), found);
  }
}

void RdmaDevices::add_port(RdmaPort port, const ibv::PortAttr& found) {
  const std::string name = port.device + ":" + std::to_string(port.number);
  RdmaAddress& address = port.address;
  const int active = std::clamp(found.active_mtu, int{ibv::kMtu256}, int{ibv::kMtu4096});
  const int mtu = settings_.mtu == 0 ? active : std::min(active, mtu_of(settings_.mtu));
  address.mtu = static_cast<std::uint8_t>(mtu);
  address.lid = found.lid;
  address.link_layer =
      found.link_layer == ibv::kLinkEthernet ? ibv::kLinkEthernet : ibv::kLinkInfiniBand;
  port.max_message = found.max_msg_sz;
  if (!settings_.link_layer.empty() && settings_.link_layer != link_layer_name(address.link_layer))
    return leave_out(name, str_cat("GRADWIRE_IB_LINK_LAYER=", settings_.link_layer, ", and it is ",
                                   link_layer_name(address.link_layer)));
  const auto entries = choose_gids(port, found.gid_tbl_len);
  if (entries.empty())
    return leave_out(name, settings_.gid_index < 0
                               ? "it has no RoCE v2 address (give its interface an IPv4 one)"
                               : "it has no GID of index GRADWIRE_IB_GID_INDEX=" +
                                     std::to_string(settings_.gid_index));
  for (const ibv::GidEntry& entry : entries) ports_.push_back(with_gid(port, entry));
}

// Returns the GID that the user asked for or, of InfiniBand, the first one. Of RoCE it returns all
// of the best kind: each pair finds the one by which it is reached.
std::vector<ibv::GidEntry> RdmaDevices::choose_gids(const RdmaPort& port, int count) const {
  const bool any = port.address.link_layer == ibv::kLinkInfiniBand || settings_.gid_index >= 0;
  std::vector<ibv::GidEntry> best;
  for (int index = std::max(settings_.gid_index, 0); index < count; ++index) {
    ibv::GidEntry entry{};
    const bool there =
        verbs_.query_gid_ex(port.context, port.number, static_cast<std::uint32_t>(index), &entry, 0,
                            sizeof entry) == 0;
    if (any) return there ? std::vector{entry} : best;
    if (!there || preference(entry) == 0) continue;
    const int gain = best.empty() ? 1 : preference(entry) - preference(best[0]);
    if (gain > 0) best.clear();
    if (gain >= 0) best.push_back(entry);
  }
  return best;
}

// Throws where too little memory can be locked. It finds out by trial, since a capability and the
// user namespace matter too.
void RdmaDevices::require_lockable_memory() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= kLockable) return;
  void* memory = ::mmap(nullptr, kLockable, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) refuse(system_message("mmap", errno));
  ibv::Mr* registered = verbs_.reg_mr(ports_[0].pd, memory, kLockable, ibv::kLocalWrite);
  const int error = errno;
  if (registered != nullptr) verbs_.dereg_mr(registered);
  ::munmap(memory, kLockable);
  if (registered == nullptr)
    refuse(str_cat(
        system_message("memory for RDMA cannot be registered", error),
        ": the memory-lock limit is ", limit.rlim_cur >> 20, " MiB, registered staging may take ",
        kLockable >> 20,
        " MiB; raise it (`ulimit -l unlimited`, LimitMEMLOCK=infinity of systemd, docker run "
        "--ulimit memlock=-1), ",
        kWithout));
}

namespace {

bool share_a_network(const RdmaAddress& one, const RdmaAddress& other) {
  return !one.network.empty() && one.network == other.network && one.link_layer == other.link_layer;
}

// Returns whether two ports belong together: among several ports on one network, the n-th of one
// end goes with the n-th of the other, counted from the front again where one end has fewer.
bool in_step(std::span<const RdmaAddress> lower, std::size_t i, std::span<const RdmaAddress> higher,
             std::size_t j) {
  const auto like = [&](const RdmaAddress& each) { return share_a_network(each, lower[i]); };
  const auto position = std::ranges::count_if(lower.first(i), like);
  const auto peer_position = std::ranges::count_if(higher.first(j), like);
  return position % std::ranges::count_if(higher, like) ==
         peer_position % std::ranges::count_if(lower, like);
}

}  // namespace

std::pair<int, int> pair_ports(std::span<const RdmaAddress> lower,
                               std::span<const RdmaAddress> higher, int lower_rank,
                               int higher_rank) {
  std::vector<std::pair<int, int>> found, by_position;
  for (std::size_t i = 0; i < lower.size(); ++i)
    for (std::size_t j = 0; j < higher.size(); ++j) {
      const std::pair pair{static_cast<int>(i), static_cast<int>(j)};
      if (share_a_network(lower[i], higher[j]) && in_step(lower, i, higher, j))
        found.push_back(pair);
      if (i == j && lower[i].link_layer == higher[j].link_layer) by_position.push_back(pair);
    }
  if (found.empty()) found = std::move(by_position);
  if (found.empty()) return {-1, -1};
  // This spreads neighbours in a ring, and the leaves of a star, evenly.
  const int turn = (lower_rank + higher_rank) / 2;
  return found[at(turn) % found.size()];
}

}  // namespace gradwire::transport
