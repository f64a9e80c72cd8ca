#include "gradwire/transport/rdma/rdma_addresses.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>

namespace gradwire::transport {
namespace {

constexpr std::size_t kIpv4At = 12;  // in a GID that holds one

using Bits = std::span<const std::uint8_t>;

// Returns the bytes of an IPv4 or IPv6 socket address; empty for any other.
Bits address_bytes(const sockaddr* address) {
  if (address == nullptr) return {};
  if (address->sa_family == AF_INET) {
    const auto& found = reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
    return {reinterpret_cast<const std::uint8_t*>(&found), 4};
  }
  if (address->sa_family == AF_INET6)
    return reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr.s6_addr;
  return {};
}

Bits address_bytes(const ibv::Gid& gid) {
  return is_ipv4(gid) ? Bits(gid).subspan(kIpv4At) : Bits(gid);
}

std::string address_text(Bits address) {
  char text[INET6_ADDRSTRLEN] = "";
  ::inet_ntop(address.size() == 4 ? AF_INET : AF_INET6, address.data(), text, sizeof text);
  return text;
}

// Returns a network's text: "198.18.0.0/24".
std::string network_text(Bits address, Bits mask) {
  ibv::Gid masked{};
  int bits = 0;
  for (std::size_t i = 0; i < address.size(); ++i) {
    masked[i] = address[i] & mask[i];
    bits += std::popcount(mask[i]);
  }
  return str_cat(address_text(Bits(masked).first(address.size())), "/", bits);
}

bool word_matches(std::string_view word, bool exact, std::string_view device, int port) {
  const std::size_t colon = word.find(':');
  if (colon != std::string_view::npos) {
    int wanted = -1;
    std::from_chars(word.data() + colon + 1, word.data() + word.size(), wanted);
    if (wanted != port) return false;
    word = word.substr(0, colon);
  }
  return !word.empty() && (exact ? word == device : device.starts_with(word));
}

std::string_view take(std::string_view& text, char prefix, bool& found) {
  found = text.starts_with(prefix);
  if (found) text.remove_prefix(1);
  return text;
}

}  // namespace

bool is_ipv4(const ibv::Gid& gid) {
  return std::all_of(gid.begin(), gid.begin() + 10, [](auto byte) { return byte == 0; }) &&
         gid[10] == 0xff && gid[11] == 0xff;
}

bool is_link_local(const ibv::Gid& gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }

std::string gid_text(const ibv::Gid& gid) { return address_text(address_bytes(gid)); }

std::string ethernet_network(const ibv::Gid& gid) {
  if (is_link_local(gid)) return "";
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "";
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(list, ::freeifaddrs);
  const Bits wanted = address_bytes(gid);
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    const Bits address = address_bytes(each->ifa_addr);
    const Bits mask = address_bytes(each->ifa_netmask);
    if (mask.size() == address.size() && std::ranges::equal(address, wanted))
      return "ethernet " + network_text(address, mask);
  }
  return "";
}

std::string infiniband_network(const ibv::Gid& gid) {
  std::string text = "infiniband ";
  for (std::size_t i = 0; i < 8; ++i) {
    char byte[3];
    std::snprintf(byte, sizeof byte, "%02x", gid[i]);
    text += byte;
  }
  return text;
}

bool hca_matches(std::string_view pattern, std::string_view device, int port) {
  bool excluded = false, exact = false;
  take(pattern, '^', excluded);
  take(pattern, '=', exact);
  if (pattern.empty()) return true;
  bool named = false;
  while (!pattern.empty()) {
    const std::size_t end = std::min(pattern.find(','), pattern.size());
    named = named || word_matches(pattern.substr(0, end), exact, device, port);
    pattern.remove_prefix(std::min(end + 1, pattern.size()));
  }
  return named != excluded;
}

}  // namespace gradwire::transport
