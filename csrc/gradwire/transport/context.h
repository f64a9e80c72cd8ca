// A Context: what the links of one kind share within a process, such as its open RDMA devices or
// the rate of an emulated NIC. Only the kind that opened it knows what it holds.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gradwire::transport {

// The settings of a kind of link, by environment variable; unset variables are left out.
using Settings = std::map<std::string, std::string, std::less<>>;

// Any thread may use it: all communicators of a process share one.
class Context {
 public:
  virtual ~Context() = default;

  // Returns a line for each device, for people.
  virtual std::vector<std::string> describe() const { return {}; }
  // Returns the names of networks; two ranks with a name in common reach each other. `only`: there
  // is no other transport to fall back to, so networks that may be the same count as the same.
  virtual std::vector<std::string> networks(bool /*only*/) const { return {}; }
};

using Contexts = std::map<std::string, std::shared_ptr<Context>, std::less<>>;  // by transport

// What open_transport() found on this machine.
struct Opened {
  std::shared_ptr<Context> context{};  // null where links of this kind share nothing
  std::string why_not{};               // why no link of this kind can be made; empty where it can

  bool usable() const { return why_not.empty(); }
};

}  // namespace gradwire::transport
