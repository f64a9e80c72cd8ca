#include "gradwire/transport/handshake.h"

#include <array>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

constexpr std::uint32_t kHelloMagic = 0x324c5247;  // "GRL2"; changes with the version of links

struct Hello {
  std::uint32_t magic = kHelloMagic;
  std::int32_t from = -1;
  std::int32_t to = -1;
  std::int32_t size = 0;
  std::uint64_t max_message = 0;
  std::int64_t messages = 0;
  std::int32_t streams = 1;
  std::int32_t ways = 1;
  std::array<char, 16> transport{};

  Hello() = default;
  Hello(const LinkId& link, const LinkOptions& options, StreamCounts counts)
      : from(link.rank),
        to(link.peer),
        size(options.size),
        max_message(options.max_message),
        messages(options.messages),
        streams(counts.streams),
        ways(counts.ways) {
    link.transport.copy(transport.data(), transport.size());
  }
};
static_assert(sizeof(Hello) == 56);

template <typename Value>
void expect_same(const LinkId& link, const char* what, Value here, Value there) {
  if (here == there) return;
  throw InvalidArgument(describe(link, str_cat(what, " is ", here, " here and ", there,
                                               " there; start all ranks with the same options")));
}

void check(const LinkId& link, const Hello& mine, const Hello& theirs) {
  if (theirs.magic != kHelloMagic)
    throw_transport_error(link, "the other end does not speak this version's link protocol");
  if (theirs.transport != mine.transport)
    throw_transport_error(link, "the other end makes another kind of link");
  if (theirs.from != mine.to || theirs.to != mine.from)
    throw_transport_error(
        link, str_cat("the other end is rank ", theirs.from, " calling rank ", theirs.to));
  expect_same(link, "size", mine.size, theirs.size);
  expect_same(link, "max_message", mine.max_message, theirs.max_message);
  expect_same(link, "messages", mine.messages, theirs.messages);
  expect_same(link, "the number of streams", mine.streams, theirs.streams);
  expect_same(link, "the number of ways", mine.ways, theirs.ways);
}

}  // namespace

void send_hello(const Stream& to, const LinkId& link, const LinkOptions& options,
                StreamCounts counts) {
  send_value(to, Hello(link, options, counts), link);
}

void receive_hello(const Stream& from, const LinkId& link, const LinkOptions& options,
                   const WaitLimit& wait_limit, StreamCounts counts) {
  check(link, Hello(link, options, counts), receive_value<Hello>(from, link, wait_limit));
}

}  // namespace gradwire::transport
