// A kind of link, and what its links share within a process. Each kind's file defines one, and
// transport.cc lists them.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/base/link_cost.h"

namespace gradwire::transport {

class Transport;
struct LinkOptions;

// The settings of a kind of link, by environment variable; unset variables are left out.
using Settings = std::map<std::string, std::string, std::less<>>;

// What the links of one kind share within a process, such as its open RDMA devices or the rate of
// an emulated NIC. Only the kind that opened it knows what it holds. Any thread may use it.
class TransportContext {
 public:
  virtual ~TransportContext() = default;

  // Returns a line for each device, for people.
  virtual std::vector<std::string> describe() const { return {}; }
  // Returns the names of networks; two ranks with a name in common reach each other. `only`: there
  // is no other transport to fall back to, so networks that may be the same count as the same.
  virtual std::vector<std::string> networks(bool /*only*/) const { return {}; }
};

using Contexts =
    std::map<std::string, std::shared_ptr<TransportContext>, std::less<>>;  // by transport

// What open_transport() found on this machine.
struct OpenedTransport {
  std::shared_ptr<TransportContext> context{};  // null where links of this kind share nothing
  std::string why_not{};  // why no link of this kind can be made; empty where it can

  bool usable() const { return why_not.empty(); }
};

// Which ranks a kind of link can join: threads of one process, processes of one host, ranks whose
// contexts name a network in common, or all.
enum class Reach { kProcess, kHost, kNetwork, kAll };

// The sockets over which links are made.
enum class Sockets { kUnix, kTcp };

// An environment variable that open() reads, as the documentation shows it.
struct EnvironmentVariable {
  std::string_view name;
  std::string_view meaning;
  std::string_view unset;  // what applies without it
};

struct TransportKind {
  std::string_view name;
  Reach reach = Reach::kAll;
  Sockets sockets = Sockets::kTcp;
  bool by_default = true;  // offered to peers where the user names no transports
  std::unique_ptr<Transport> (*make)(const LinkOptions&) = nullptr;
  // Probes whether links can be made on this machine, and opens what they share. Throws
  // InvalidArgument for a wrong setting.
  OpenedTransport (*open)(const Settings&) = [](const Settings&) { return OpenedTransport{}; };
  std::span<const EnvironmentVariable>
      settings{};  // where reach is kNetwork, the first names devices
  // The built-in cost model's costs of a link. The defaults are tcp's.
  LinkCost within_host{4e-6, 8e-6, 0, 1.5e-10};
  LinkCost between_hosts{4e-6, 3e-5, 8e-10, 1.5e-10};
};

}  // namespace gradwire::transport
