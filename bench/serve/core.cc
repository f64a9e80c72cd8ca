// The native core of the parameter server, beside memcpy of the same run. Takes turns: each line is
// the least and the median over so many.
//
//   build/release/bench_serve [elements] [turns]
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/codec/simd/simd.h"
#include "gradwire/serve/client/client.h"
#include "gradwire/serve/server/server.h"
#include "gradwire/serve/vectors/block_sums.h"

namespace gradwire::serve {
namespace {

using Body = std::function<void()>;

double now(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double seconds_of(clockid_t clock, const Body& body) {
  const double begin = now(clock);
  body();
  return now(clock) - begin;
}

struct Row {
  const char* name;
  Body body;
  std::vector<double> seconds{};
};

// Prints each row beside the first one, by the ratios of each turn.
void compare(const char* title, clockid_t clock, int turns, std::vector<Row> rows) {
  for (int turn = -1; turn < turns; ++turn)
    for (Row& row : rows) {
      const double seconds = seconds_of(clock, row.body);
      if (turn >= 0) row.seconds.push_back(seconds);  // the first turn touches memory
    }
  std::printf("%s\n", title);
  for (const Row& row : rows) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < row.seconds.size(); ++i)
      ratios.push_back(row.seconds[i] / rows.front().seconds[i]);
    std::ranges::sort(ratios);
    std::vector<double> sorted = row.seconds;
    std::ranges::sort(sorted);
    std::printf("  %-28s %8.2f ms least, %8.2f median; %5.2f x median\n", row.name,
                sorted.front() * 1e3, sorted[sorted.size() / 2] * 1e3, ratios[ratios.size() / 2]);
  }
}

ParameterTable table_of(std::size_t elements, const char* rule) {
  ParameterTable table;
  table.parameters = {{"w", {elements}}};
  table.codecs = {"none", "onebit", "int8"};
  table.rule = make_rule(rule).name;
  return table;
}

// Frames of one push, encoded before they are timed.
struct Frames {
  std::vector<std::vector<std::byte>> payloads;
  std::uint16_t codec;

  Frames(const Shard& shard, std::uint16_t index, const std::vector<float>& g) : codec(index) {
    Outgoing outgoing(shard.table(), {g}, codecs_of(shard.table()),
                      {static_cast<std::uint8_t>(index)}, nullptr);
    for (const ShardFrame& frame : shard.layout().frames()) {
      auto& payload = payloads.emplace_back(kMostPayload);
      payload.resize(outgoing.encode(shard.layout(), frame, payload, copy_cached));
    }
  }
  void push(Shard& shard) const {
    for (std::size_t i = 0; i < payloads.size(); ++i) {
      const ShardFrame& frame = shard.layout().frames()[i];
      MessageHeader header;
      header.op = Op::kPush;
      header.codec = codec;
      header.flags =
          static_cast<std::uint8_t>((i == 0 ? kFirst : 0) | (i + 1 == payloads.size() ? kLast : 0));
      header.first = frame.first;
      header.count = static_cast<std::uint32_t>(frame.count);
      shard.push(1, {header, payloads[i]});
    }
  }
};

void set_zeros(Shard& shard) {
  const std::vector<float> zeros(shard.layout().elements());
  const Frames frames(shard, 0, zeros);
  for (std::size_t i = 0; i < frames.payloads.size(); ++i) {
    const ShardFrame& frame = shard.layout().frames()[i];
    MessageHeader header;
    header.flags = static_cast<std::uint8_t>((i == 0 ? kFirst : 0) |
                                             (i + 1 == frames.payloads.size() ? kLast : 0));
    header.first = frame.first;
    header.count = static_cast<std::uint32_t>(frame.count);
    shard.set(1, {header, frames.payloads[i]});
  }
}

void rules_beside_memcpy(std::size_t n, int turns) {
  std::vector<float> w(n, 1), s(n, 1), m(n), g(n, 0.01F), copy(n);
  const codec::RuleKernels& rules = codec::kernels().rules;
  codec::AdamStep adam;
  adam.epsilon = 1e-8F;
  compare("update rules, processor time, beside memcpy of as many elements",
          CLOCK_THREAD_CPUTIME_ID, turns,
          {{"memcpy", [&] { std::memcpy(copy.data(), g.data(), n * sizeof(float)); }},
           {"sgd", [&] { rules.sgd(w.data(), g.data(), 0.1F, n); }},
           {"momentum", [&] { rules.momentum(w.data(), m.data(), g.data(), 0.1F, 0.9F, n); }},
           {"adagrad", [&] { rules.adagrad(w.data(), s.data(), g.data(), 0.1F, n); }},
           {"adam", [&] { rules.adam(w.data(), m.data(), s.data(), g.data(), adam, n); }}});
}

void pushes_of_codecs(std::size_t n, int turns) {
  Shard shard(table_of(n, "adagrad:rate=0.01"), 0);
  set_zeros(shard);
  std::vector<float> g(n);
  for (std::size_t i = 0; i < n; ++i) g[i] = static_cast<float>(i % 101) - 50;
  const Frames plain(shard, 0, g), onebit(shard, 1, g), int8(shard, 2, g);
  compare("a push taken by a shard (adagrad), processor time, beside a plain one",
          CLOCK_THREAD_CPUTIME_ID, turns,
          {{"none", [&] { plain.push(shard); }},
           {"onebit", [&] { onebit.push(shard); }},
           {"int8", [&] { int8.push(shard); }}});
}

// An iteration of L-BFGS has six new dot products, of three vectors.
void dots_beside_reads(std::size_t n, int turns) {
  Vectors vectors(n, 1, block_of(n));
  for (const char* name : {"s", "y", "g"}) {
    Words values(n);
    for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<float>(i % 101) - 50;
    vectors.put(name, std::move(values));
  }
  const command::Dots six{{{"s", "s"}, {"s", "y"}, {"s", "g"}, {"y", "y"}, {"y", "g"}, {"g", "g"}}};
  std::uint64_t sum = 0;
  compare("six dot products of three vectors, processor time, beside reading as many bytes",
          CLOCK_THREAD_CPUTIME_ID, turns,
          {{"read 3 vectors",
            [&] {
              for (const char* name : {"s", "y", "g"}) {
                const SharedWords values = vectors.find(name);
                std::uint64_t parts[8] = {};
                for (std::size_t i = 0; i + 16 <= n; i += 16) {
                  std::uint64_t line[8];
                  std::memcpy(line, values->data() + i, sizeof line);
                  for (std::size_t k = 0; k < 8; ++k) parts[k] += line[k];
                }
                for (const std::uint64_t each : parts) sum += each;
              }
            }},
           {"1 pair", [&] { vectors.run(std::vector<Command>{command::Dots{{{"s", "y"}}}}); }},
           {"6 pairs", [&] { vectors.run(std::vector<Command>{six}); }}});
  if (sum == 1) std::puts("");  // so that the reads are done
}

std::pair<UniqueFd, UniqueFd> socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw Error(system_message("socketpair", errno));
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

void wait(const std::shared_ptr<ClientCall>& call) {
  while (!call->work().wait_for(1)) continue;
  call->work().rethrow();
}

// Servers, and clients of theirs, all in this process.
struct Service {
  ParameterTable table;
  std::vector<std::unique_ptr<Server>> servers;
  std::vector<std::unique_ptr<Client>> clients;

  Service(ParameterTable of, std::uint32_t shards) : table(std::move(of)) {
    table.shards = shards;
    for (std::uint32_t i = 0; i < shards; ++i) {
      servers.push_back(std::make_unique<Server>(Server::Options{i, shards, nullptr}));
      servers.back()->start();
    }
  }
  Client& connect() {
    const ClientId id = (clients.size() + 1) << 16;
    std::vector<std::unique_ptr<Channel>> channels;
    for (auto& server : servers) {
      auto [near, far] = socket_pair();
      std::jthread admission([&, socket = std::move(near)]() mutable {
        server->admit(Channel::make(End::kServer, "shm", nullptr, std::move(socket), "client",
                                    Deadline::after(10)),
                      id);
      });
      channels.push_back(Channel::make(End::kClient, "shm", nullptr, std::move(far), "shard",
                                       Deadline::after(10)));
    }
    clients.push_back(std::make_unique<Client>(table, id, std::move(channels)));
    clients.back()->start();
    wait(clients.back()->join(Deadline::never()));
    return *clients.back();
  }
};

// A push stages each element and the shard reads it there; a pull stages it and the client reads it
// there: four copies at least for each client, of which one is the rule's.
void service_beside_copies(std::size_t n, int turns) {
  Service service(table_of(n, "sgd:rate=0"), 2);
  std::vector<std::vector<float>> w(2, std::vector<float>(n)), copies = w;
  const std::vector<float> g(n, 1);
  for (int i = 0; i < 2; ++i) service.connect();
  wait(service.clients[0]->set({g}, Deadline::never()));
  const auto of_both = [&](const auto& begin) {
    std::vector<std::shared_ptr<ClientCall>> calls;
    for (std::size_t i = 0; i < 2; ++i) calls.push_back(begin(*service.clients[i], w[i]));
    for (const auto& call : calls) wait(call);
  };
  const auto push = [&] {
    of_both([&](Client& client, std::vector<float>&) {
      return client.push({g}, {}, Deadline::never(), Deadline::never());
    });
  };
  const auto pull = [&] {
    of_both([&](Client& client, std::vector<float>& to) {
      return client.pull({to}, "none", Deadline::never());
    });
  };
  const auto copy = [&](std::size_t i) {
    for (int k = 0; k < 4; ++k)
      std::memcpy(k % 2 == 0 ? copies[i].data() : w[i].data(), g.data(), n * sizeof(float));
  };
  compare("push, then pull, over shm, 2 clients, 2 shards, wall time, beside 8 copies by 2 threads",
          CLOCK_MONOTONIC, turns,
          {{"8 x memcpy",
            [&] {
              const std::jthread other([&] { copy(1); });
              copy(0);
            }},
           {"push, then pull", [&] {
              push();
              pull();
            }}});
}

void small_pulls(int turns) {
  std::vector<float> few(1000);
  Service service(table_of(few.size(), "sgd:rate=0"), 2);
  Client& client = service.connect();
  wait(client.set({few}, Deadline::never()));
  compare("a pull of 4 kB over shm, 2 shards, 100 times", CLOCK_MONOTONIC, turns,
          {{"pull", [&] {
              for (int i = 0; i < 100; ++i) wait(client.pull({few}, "none", Deadline::never()));
            }}});
}

// 256 pushes of 4 MB in all, by so many clients at once.
void many_clients(int turns) {
  constexpr std::size_t kElements = 1 << 20, kPushes = 256;
  const std::vector<float> g(kElements, 1);
  Service few(table_of(kElements, "sgd:rate=0"), 1), many(table_of(kElements, "sgd:rate=0"), 1);
  const auto fill = [&](Service& service, int count) {
    for (int i = 0; i < count; ++i) service.connect();
    wait(service.clients[0]->set({g}, Deadline::never()));
  };
  fill(few, 4);
  fill(many, 64);
  const auto push = [&](Service& service) {
    std::vector<std::shared_ptr<ClientCall>> calls;
    for (std::size_t i = 0; i < kPushes; i += service.clients.size()) {
      for (auto& client : service.clients)
        calls.push_back(client->push({g}, {}, Deadline::never(), Deadline::never()));
      for (const auto& call : std::exchange(calls, {})) wait(call);
    }
  };
  compare("256 pushes of 4 MB to one shard over shm", CLOCK_MONOTONIC, turns,
          {{"by 4 clients", [&] { push(few); }}, {"by 64 clients", [&] { push(many); }}});
}

}  // namespace
}  // namespace gradwire::serve

int main(int count, char** arguments) {
  using namespace gradwire::serve;
  const std::size_t n = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 12'500'000;
  const int turns = count > 2 ? std::atoi(arguments[2]) : 9;
  const gradwire::codec::FloatEnvironment environment;
  rules_beside_memcpy(n, turns);
  pushes_of_codecs(n, turns);
  dots_beside_reads(2 * n, turns);
  service_beside_copies(2 * n, turns);
  small_pulls(turns);
  many_clients(turns);
  return 0;
}
