// A Kind of link. Each kind's file defines one, and transport.cc lists them.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "gradwire/base/link_cost.h"
#include "gradwire/transport/context.h"

namespace gradwire::transport {

class Transport;
struct Options;

// Which ranks a kind of link connects: threads of one process, processes of one host, ranks whose
// contexts name a network in common, or all.
enum class Reach { kProcess, kHost, kNetwork, kAll };

// The sockets over which links are made.
enum class Sockets { kUnix, kTcp };

// An environment variable that open() reads, as the documentation shows it.
struct Setting {
  std::string_view name;
  std::string_view meaning;
  std::string_view unset;  // what applies without it
};

struct Kind {
  std::string_view name;
  Reach reach = Reach::kAll;
  Sockets sockets = Sockets::kTcp;
  bool by_default = true;  // offered to peers where the user names no transports
  std::unique_ptr<Transport> (*make)(const Options&) = nullptr;
  // Finds out whether links can be made here, and opens what they share. Throws InvalidArgument for
  // a wrong setting.
  Opened (*open)(const Settings&) = [](const Settings&) { return Opened{}; };
  std::span<const Setting> settings{};  // where reach is kNetwork, the first one names devices
  // What the built-in cost model takes a link to cost. The defaults are tcp's.
  LinkCost within_host{4e-6, 8e-6, 0, 1.5e-10};
  LinkCost between_hosts{4e-6, 3e-5, 8e-10, 1.5e-10};
};

}  // namespace gradwire::transport
