#include "gradwire/transport/transport.h"

#include "gradwire/base/named.h"

// A new kind of link joins this list, best first; its file defines `extern const TransportKind
// NAME_kind`.
#define GRADWIRE_TRANSPORTS(each) each(inproc) each(shm) each(rdma) each(tcp) each(emulated)

namespace gradwire::transport {

#define GRADWIRE_DECLARE(name) extern const TransportKind name##_kind;
GRADWIRE_TRANSPORTS(GRADWIRE_DECLARE)
#undef GRADWIRE_DECLARE

namespace {

constexpr const TransportKind* kKinds[] = {
#define GRADWIRE_ADDRESS(name) &name##_kind,
    GRADWIRE_TRANSPORTS(GRADWIRE_ADDRESS)
#undef GRADWIRE_ADDRESS
};

void check(const LinkOptions& options) {
  constexpr std::size_t kLargestMessage = std::size_t{1} << 30;
  constexpr int kMostMessages = 1 << 16;
  const bool rank_fits = options.rank >= 0 && options.rank < options.size;
  const bool message_fits = options.max_message >= 1 && options.max_message <= kLargestMessage;
  const bool count_fits =
      options.messages >= 1 && options.messages <= kMostMessages && options.messages_per_peer >= 1;
  if (rank_fits && message_fits && count_fits) return;
  throw InvalidArgument(
      str_cat("transport options out of range: rank ", options.rank, " of ", options.size,
              ", max_message ", options.max_message, " (1 to 2^30), messages ", options.messages,
              " (1 to 65536), messages_per_peer ", options.messages_per_peer, " (1 or more)"));
}

}  // namespace

std::span<const TransportKind* const> transport_kinds() { return kKinds; }

const TransportKind& transport_kind(std::string_view name) {
  return *find_named("transport", kKinds, name, &TransportKind::name);
}

OpenedTransport open_transport(std::string_view name, const Settings& settings) {
  return transport_kind(name).open(settings);
}

std::unique_ptr<Transport> make_transport(std::string_view name, const LinkOptions& options) {
  const TransportKind& kind = transport_kind(name);
  check(options);
  if (options.context) return kind.make(options);
  const OpenedTransport opened = kind.open({});
  if (!opened.usable())
    throw InvalidArgument(str_cat("transport ", name, " is not usable here: ", opened.why_not));
  LinkOptions with_context = options;
  with_context.context = opened.context;
  return kind.make(with_context);
}

}  // namespace gradwire::transport
