// Clients and shards inside one test.
#pragma once

#include <bit>
#include <cstring>
#include <random>

#include "gradwire/codec/simd/simd.h"
#include "gradwire/serve/client/client.h"
#include "gradwire/serve/server/server.h"
#include "transport_harness.h"

namespace gradwire::serve {

inline constexpr const char* kAllTransports[] = {"inproc", "shm", "tcp", "emulated"};

// Parameters of many sizes: several frames, several parameters in a frame, a parameter in two
// shards, a scalar.
inline ParameterTable some_table(std::uint32_t shards = 1, std::string rule = "sgd:rate=0.5") {
  ParameterTable table;
  table.parameters = {{"embedding", {300, 211}},
                      {"layer.weight", {64, 32}},
                      {"layer.bias", {64}},
                      {"scale", {}},
                      {"head", {17, 1999}}};
  table.rule = make_rule(rule).name;
  table.codecs = {"none", "fp16", "bf16", "int8", "onebit", "threshold", "topk:density=0.01"};
  for (std::string& each : table.codecs) each = codec::make_codec(each)->name();
  table.shards = shards;
  return table;
}

using Arrays = std::vector<std::vector<float>>;  // one for each parameter

inline Arrays zeros_of(const ParameterTable& table) {
  Arrays made;
  for (const Parameter& each : table.parameters) made.emplace_back(each.elements());
  return made;
}

inline Arrays random_of(const ParameterTable& table, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Arrays made = zeros_of(table);
  for (auto& each : made)
    for (float& x : each) x = normal(random);
  return made;
}

template <typename Spans>
Spans spans_of(const Arrays& arrays) {
  Spans spans;
  for (const auto& each : arrays) spans.emplace_back(const_cast<float*>(each.data()), each.size());
  return spans;
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// The elements of a shard's range, out of all arrays.
inline std::vector<float> range_of(const ShardLayout& layout, const Arrays& arrays) {
  std::vector<float> range(layout.elements());
  for (const ParameterSpan& span : layout.spans())
    std::copy_n(arrays[span.parameter].begin() + static_cast<std::ptrdiff_t>(span.offset),
                span.count, range.begin() + static_cast<std::ptrdiff_t>(span.first));
  return range;
}

struct Pair {
  std::unique_ptr<Channel> server, client;
};

inline Pair channels(std::string_view transport, const std::string& client = "replica a",
                     const std::string& server = "shard 0") {
  auto ends = transport::connect(transport, 2, channel_options(End::kServer));
  return {std::make_unique<Channel>(std::move(ends[0]), client),
          std::make_unique<Channel>(std::move(ends[1]), server)};
}

inline ClientId id_of(int client, unsigned incarnation = 0) {
  return (static_cast<ClientId>(client) + 1) << 16 | incarnation;
}

// Servers with threads of their own, or driven by turn().
class Job {
 public:
  Job(std::uint32_t shards, std::string_view transport, bool threads)
      : transport_(transport), threads_(threads) {
    for (std::uint32_t i = 0; i < shards; ++i) {
      servers.push_back(
          std::make_unique<Server>(Server::Options{i, shards, [](std::string_view) {}}));
      if (threads) servers.back()->start();
    }
  }

  std::unique_ptr<Client> connect(const ParameterTable& table, int client,
                                  unsigned incarnation = 0) {
    const std::string name = "replica " + std::string(1, static_cast<char>('a' + client));
    std::vector<std::unique_ptr<Channel>> ends;
    for (std::size_t i = 0; i < servers.size(); ++i) {
      Pair pair = channels(transport_, name, "shard " + std::to_string(i));
      servers[i]->admit(std::move(pair.server), id_of(client, incarnation));
      ends.push_back(std::move(pair.client));
    }
    auto made = std::make_unique<Client>(table, id_of(client, incarnation), std::move(ends));
    if (threads_) made->start();
    return made;
  }

  // Drives servers and clients until the call is over; rethrows its error.
  void wait(const std::shared_ptr<ClientCall>& call, std::initializer_list<Client*> clients = {}) {
    waited_for_.push_back(call);
    const Deadline deadline = Deadline::after(transport::kTestSeconds);
    while (!call->work().done() && !deadline.passed()) {
      if (threads_) {
        call->work().wait_for(1);
        continue;
      }
      for (Client* each : clients) each->turn();
      for (auto& each : servers) each->turn();
    }
    if (!call->work().done()) throw Timeout("the test waited too long", kNoPeer);
    call->work().rethrow();
  }

  std::vector<std::unique_ptr<Server>> servers;

 private:
  std::string_view transport_;
  bool threads_;
  // Kept, since ThreadSanitizer does not see how libstdc++ counts references to exceptions: the
  // last one must not go on a client's thread.
  std::vector<std::shared_ptr<ClientCall>> waited_for_;
};

inline Deadline soon() { return Deadline::after(transport::kTestSeconds); }

}  // namespace gradwire::serve
