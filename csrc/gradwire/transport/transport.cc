#include "gradwire/transport/transport.h"

#include <array>

#include "gradwire/base/error.h"
#include "gradwire/transport/link_kinds.h"

namespace gradwire::transport {
namespace {

struct Kind {
  std::string_view name;
  Viability (*probe)(const Options&);
  std::unique_ptr<Transport> (*make)(const Options&);
};

Viability always_viable(const Options&) { return {}; }

// A new kind of link joins this list, best first.
constexpr std::array kKinds = {
    Kind{"inproc", probe_shared_memory, make_inproc},
    Kind{"shm", probe_shared_memory, make_shm},
    Kind{"rdma", probe_rdma, make_rdma},
    Kind{"tcp", always_viable, make_tcp},
    Kind{"emulated", always_viable, make_emulated},
};

const Kind& kind_of(std::string_view name) {
  std::string known;
  for (const Kind& kind : kKinds) {
    if (kind.name == name) return kind;
    known += (known.empty() ? "" : ", ") + std::string(kind.name);
  }
  throw InvalidArgument("unknown transport '" + std::string(name) + "'; use one of: " + known);
}

void check(const Options& options) {
  constexpr std::size_t kLargestMessage = std::size_t{1} << 30;
  constexpr int kMostMessages = 1 << 16;
  const bool rank_fits = options.rank >= 0 && options.rank < options.size;
  const bool message_fits = options.max_message >= 1 && options.max_message <= kLargestMessage;
  const bool count_fits =
      options.messages >= 1 && options.messages <= kMostMessages && options.messages_per_peer >= 1;
  if (rank_fits && message_fits && count_fits) return;
  throw InvalidArgument("transport options out of range: rank " + std::to_string(options.rank) +
                        " of " + std::to_string(options.size) + ", max_message " +
                        std::to_string(options.max_message) + " (1 to 2^30), messages " +
                        std::to_string(options.messages) + " (1 to 65536), messages_per_peer " +
                        std::to_string(options.messages_per_peer) + " (1 or more)");
}

}  // namespace

std::vector<std::string_view> transport_names() {
  std::vector<std::string_view> names;
  for (const Kind& kind : kKinds) names.push_back(kind.name);
  return names;
}

Viability probe(std::string_view name) { return kind_of(name).probe({}); }

std::unique_ptr<Transport> make_transport(std::string_view name, const Options& options) {
  const Kind& kind = kind_of(name);
  check(options);
  if (const Viability viability = kind.probe(options); !viability.ok)
    throw InvalidArgument("transport " + std::string(name) +
                          " is not usable here: " + viability.reason);
  return kind.make(options);
}

}  // namespace gradwire::transport
