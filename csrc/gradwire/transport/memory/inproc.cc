// inproc: ranks that are threads of one process. They share the arenas themselves, so tools that
// follow addresses (ThreadSanitizer) see every access.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>

#include "gradwire/base/error.h"
#include "gradwire/transport/memory/arena_transport.h"

namespace gradwire::transport {
namespace {

// Throws unless the kernel says that this process made the socket: the pointers sent over it are
// valid in that process only.
void require_same_process(int socket, const LinkId& link) {
  ucred maker{};
  socklen_t size = sizeof maker;
  ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &maker, &size);
  if (maker.pid != ::getpid())
    throw InvalidArgument(describe(link, "inproc joins threads of one process; use shm"));
}

// Sends and receives in one step: a pointer that nobody receives would keep its arena for ever.
std::shared_ptr<Arena> swap_pointers(int socket, const std::shared_ptr<Arena>& own,
                                     const LinkId& link, const LinkOptions&,
                                     const WaitLimit& wait_limit) {
  require_same_process(socket, link);
  auto mine = std::make_unique<std::shared_ptr<Arena>>(own);
  send_value(socket, mine.get(), link);
  static_cast<void>(mine.release());  // the peer owns it now
  const std::unique_ptr<std::shared_ptr<Arena>> theirs(
      receive_value<std::shared_ptr<Arena>*>(socket, link, wait_limit));
  return *theirs;
}

}  // namespace

extern constinit const TransportKind inproc_kind{
    .name = "inproc",
    .reach = Reach::kProcess,
    .sockets = Sockets::kUnix,
    .by_default = false,
    .make = [](const LinkOptions& options) -> std::unique_ptr<Transport> {
      return std::make_unique<ArenaTransport>("inproc", options,
                                              ArenaExchange{nullptr, swap_pointers});
    },
    .open = open_shared_memory,
    .within_host = kMemoryCost,
    .between_hosts = kMemoryCost,
};

}  // namespace gradwire::transport
