// Messages of virtual ranks, of the CPU transports, and of both: bytes arrive, in their order, and
// what goes wrong is told.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <semaphore>
#include <thread>

#include "cuda_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/cuda/messages/messages_host.h"
#include "gradwire/cuda/messages/messages_routed.h"

namespace gradwire::cuda {
namespace {

std::size_t at(Rank rank) { return static_cast<std::size_t>(rank); }

std::vector<std::byte> pattern(Rank from, Rank to, std::size_t bytes) {
  std::vector<std::byte> made(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    made[i] = static_cast<std::byte>(i * 7 + at(from) * 31 + at(to) * 17);
  return made;
}

// Every rank's messages, by one of the ways.
class Ways : public testing::TestWithParam<std::string_view> {
 protected:
  static constexpr int kRanks = 4;
  Ways()
      : loopback_(simulated_api(), kRanks),
        carriers_(kRanks),
        inner_(simulated_api(), 2),
        outer_(simulated_api(), 2) {
    for (Rank r = 0; r < kRanks; ++r) {
      streams_.push_back(std::make_unique<OwnedStream>(simulated_api()));
      messages_.push_back(make(r));
    }
  }
  ~Ways() override {
    for (auto& each : streams_) simulated_api().synchronize(each->get());
  }

  std::unique_ptr<Messages> make(Rank rank) {
    if (GetParam() == "loopback") return loopback_.endpoint(rank, 10);
    auto host = std::make_unique<HostMessages>(simulated_api(), carriers_[rank], 10,
                                               functions_.emplace_back(simulated_api()));
    if (GetParam() == "host") return host;
    Loopback& pair = rank < 2 ? inner_ : outer_;  // two hosts of two ranks
    std::vector<std::unique_ptr<Messages>> ways;
    ways.push_back(std::move(host));
    ways.push_back(pair.endpoint(rank % 2, 10));
    std::vector<RoutedMessages::Route> routes;
    for (Rank peer = 0; peer < kRanks; ++peer)
      routes.push_back(peer / 2 == rank / 2 ? RoutedMessages::Route{1, peer % 2}
                                            : RoutedMessages::Route{0, peer});
    return std::make_unique<RoutedMessages>(std::move(ways), std::move(routes));
  }

  // Stays until the end, when nothing uses it any more.
  DeviceBytes& allocate(std::size_t bytes) {
    auto made = std::make_unique<DeviceBytes>(bytes);
    const std::lock_guard lock(mutex_);
    return *memory_.emplace_back(std::move(made));
  }

  void run(const std::function<void(Rank, Messages&, Stream)>& body) {
    std::vector<std::exception_ptr> thrown(kRanks);
    std::vector<std::thread> threads;
    for (Rank r = 0; r < kRanks; ++r)
      threads.emplace_back([&, r] {
        try {
          body(r, *messages_[at(r)], streams_[at(r)]->get());
        } catch (...) {
          thrown[at(r)] = std::current_exception();
        }
      });
    for (auto& each : threads) each.join();
    for (const auto& each : thrown)
      if (each) std::rethrow_exception(each);
  }

  Loopback loopback_;
  exec::Ranks carriers_;
  std::deque<HostFunctionQueue> functions_;  // one for each rank, as if they were processes
  Loopback inner_, outer_;
  std::vector<std::unique_ptr<OwnedStream>> streams_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<DeviceBytes>> memory_;
  std::vector<std::unique_ptr<Messages>> messages_;
};

TEST_P(Ways, AllToAllArrivesInOrder) {
  run([this](Rank me, Messages& messages, Stream stream) {
    for (std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{5000}}) {
      std::vector<DeviceBytes*> out, in;
      messages.begin();
      for (Rank peer = 0; peer < kRanks; ++peer)
        for (std::size_t again = 0; again < 2; ++again) {
          out.push_back(&allocate(bytes + again));
          in.push_back(&allocate(bytes + again));
          if (peer == me) continue;
          out.back()->put(pattern(me, peer, bytes + again).data(), stream);
          messages.send(out.back()->data(), bytes + again, peer);
          messages.receive(in.back()->data(), bytes + again, peer);
        }
      simulated_api().synchronize(stream);
      messages.end(stream);
      for (std::size_t i = 0; i < in.size(); ++i) {
        const auto peer = static_cast<Rank>(i / 2);
        if (peer == me) continue;
        std::vector<std::byte> got(bytes + i % 2);
        in[i]->get(got.data(), stream);
        EXPECT_TRUE(got == pattern(peer, me, bytes + i % 2)) << me << " from " << peer;
      }
    }
  });
}

// What counts of slots arrives; the rest may have any content.
TEST_P(Ways, SlottedMessagesArrive) {
  run([this](Rank me, Messages& messages, Stream stream) {
    const std::vector<Slotted> layout = {{3, 32}, {1, 16}};
    const std::size_t bytes = layout[0].bytes() + layout[1].bytes();
    const auto message_of = [&](Rank from) {
      std::vector<std::byte> made(bytes, std::byte{0xEE});
      const std::uint32_t first[] = {7, 0, 32}, second[] = {5};
      std::memcpy(made.data(), first, sizeof first);
      std::memcpy(made.data() + layout[0].bytes(), second, sizeof second);
      for (std::size_t u = 0; u < 3; ++u)
        for (std::uint32_t i = 0; i < first[u]; ++i)
          made[layout[0].table_bytes() + 32 * u + i] = static_cast<std::byte>(at(from) + u + i);
      for (std::uint32_t i = 0; i < 5; ++i)
        made[layout[0].bytes() + layout[1].table_bytes() + i] = static_cast<std::byte>(i);
      return made;
    };
    DeviceBytes &out = allocate(bytes), &in = allocate(bytes);
    const Rank next = (me + 1) % kRanks, before = (me + kRanks - 1) % kRanks;
    const auto own = message_of(me);
    out.put(own.data(), stream);
    simulated_api().synchronize(stream);
    messages.begin();
    messages.send(out.data(), bytes, next, layout);
    messages.receive(in.data(), bytes, before, layout);
    messages.end(stream);
    std::vector<std::byte> got(bytes);
    in.get(got.data(), stream);
    const auto expected = message_of(before);
    const auto same = [&](std::size_t from, std::size_t count) {
      return std::equal(got.begin() + static_cast<std::ptrdiff_t>(from),
                        got.begin() + static_cast<std::ptrdiff_t>(from + count),
                        expected.begin() + static_cast<std::ptrdiff_t>(from));
    };
    EXPECT_TRUE(same(0, 12) && same(layout[0].bytes(), 4));
    EXPECT_TRUE(same(layout[0].table_bytes(), 7) && same(layout[0].table_bytes() + 64, 32));
    EXPECT_TRUE(same(layout[0].bytes() + layout[1].table_bytes(), 5));
  });
}

TEST_P(Ways, AbortEndsWhatWaits) {
  EXPECT_THROW(run([this](Rank me, Messages& messages, Stream stream) {
                 DeviceBytes& memory = allocate(64);
                 if (me == 0) {
                   std::this_thread::sleep_for(std::chrono::milliseconds(50));
                   for (auto& each : messages_) each->abort();
                   return;
                 }
                 messages.begin();
                 messages.receive(memory.data(), 64, 0);
                 messages.end(stream);
                 simulated_api().synchronize(stream);
                 messages.check();
               }),
               Aborted);
}

INSTANTIATE_TEST_SUITE_P(Ways, Ways, testing::Values("loopback", "host", "routed"));

TEST(Loopback, NamesWhoDoesNotCome) {
  Loopback shared(simulated_api(), 2);
  OwnedStream stream(simulated_api());
  DeviceBytes memory(4);
  const auto messages = shared.endpoint(0, /*timeout=*/0.05);
  messages->begin();
  messages->receive(memory.data(), 4, 1);
  try {
    messages->end(stream.get());
    FAIL() << "it did not wait for rank 1";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.peer(), 1);
  }
}

TEST(Loopback, RefusesAnotherLength) {
  Loopback shared(simulated_api(), 2);
  OwnedStream a(simulated_api()), b(simulated_api());
  DeviceBytes memory(8);
  const auto one = shared.endpoint(0, 5), other = shared.endpoint(1, 5);
  std::thread sender([&] {
    one->begin();
    one->send(memory.data(), 4, 1);
    EXPECT_THROW(one->end(a.get()), Error);
  });
  other->begin();
  other->receive(memory.data(), 8, 0);
  EXPECT_THROW(other->end(b.get()), TransportError);
  other->abort();
  sender.join();
}

// One thread a device, as users have it that run a rank in each of several threads.
TEST(Loopback, RanksOnDevicesOfTheirOwn) {
  ::setenv("SIMULATED_CUDA_DEVICES", "2", 1);
  const Api& api = simulated_api();
  Loopback shared(api, 2);
  std::vector<std::byte> got[2];
  std::vector<std::jthread> threads;
  for (Rank r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      const OnDevice here(api, r);
      const auto messages = shared.endpoint(r, 10);
      const OwnedStream stream(api);
      DeviceBytes out(100), in(100);
      out.put(pattern(r, 1 - r, 100).data(), stream.get());
      messages->begin();
      messages->send(out.data(), 100, 1 - r);
      messages->receive(in.data(), 100, 1 - r);
      messages->end(stream.get());
      got[r].resize(100);
      in.get(got[r].data(), stream.get());
      api.synchronize(stream.get());
    });
  threads.clear();
  ::unsetenv("SIMULATED_CUDA_DEVICES");
  EXPECT_TRUE(got[0] == pattern(1, 0, 100));
  EXPECT_TRUE(got[1] == pattern(0, 1, 100));
}

TEST(HostFunctionQueue, RunInTheOrderOfTheCalls) {
  const Api& api = simulated_api();
  HostFunctionQueue functions(api);
  const OwnedStream streams[] = {OwnedStream(api), OwnedStream(api), OwnedStream(api)};
  struct Note {
    std::vector<int>* order;
    int number;
  };
  std::vector<int> order;
  std::vector<Note> notes;
  for (int i = 0; i < 30; ++i) notes.push_back({&order, i});
  for (Note& each : notes)
    functions.enqueue(
        streams[static_cast<std::size_t>(each.number * 7 % 3)].get(),
        [](void* note) {
          auto* const its = static_cast<Note*>(note);
          its->order->push_back(its->number);
        },
        &each);
  for (const OwnedStream& each : streams) api.synchronize(each.get());
  ASSERT_EQ(order.size(), notes.size());
  EXPECT_TRUE(std::ranges::is_sorted(order));
}

// Messages within a host, which notes whether a stream had gone on when they were aborted.
class WithinHost final : public Messages {
 public:
  explicit WithinHost(const std::atomic<bool>& is_over) : is_over_(is_over) {}
  std::string_view name() const noexcept override { return "within"; }
  void begin() override {}
  void send(const std::byte*, std::size_t, Rank, std::span<const Slotted>) override {}
  void receive(std::byte*, std::size_t, Rank, std::span<const Slotted>) override {}
  void end(Stream) override {}
  void check() override {}
  void abort() noexcept override {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // for a stream that goes on
    EXPECT_FALSE(is_over_);
    was_aborted = true;
  }
  bool was_aborted = false;

 private:
  const std::atomic<bool>& is_over_;
};

// What other Messages carry must not go on with bytes that never came.
TEST(HostMessages, LetNothingGoOnAfterAFailureBeforeTheOthersAreAborted) {
  const Api& api = simulated_api();
  exec::Ranks carriers(2);
  HostFunctionQueue functions(api);
  const OwnedStream stream(api);
  std::atomic<bool> is_over = false;
  auto within = std::make_unique<WithinHost>(is_over);
  const WithinHost& its = *within;
  std::vector<std::unique_ptr<Messages>> ways;
  ways.push_back(std::make_unique<HostMessages>(api, carriers[0], 10, functions));
  ways.push_back(std::move(within));
  RoutedMessages messages(std::move(ways), {{}, {0, 1}});
  DeviceBytes bytes(8);
  messages.begin();
  messages.receive(bytes.data(), 8, 1, {});
  messages.end(stream.get());
  std::thread device([&] {
    api.synchronize(stream.get());
    is_over = true;
  });
  carriers[1].abort("rank 1 ends");
  const auto has_failed = [&] {
    try {
      messages.check();
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  while (!has_failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  messages.abort();
  device.join();
  EXPECT_TRUE(its.was_aborted);
}

// Rank 1 never receives the long message, which the carrier still reads when a size is refused.
TEST(HostMessages, RestOnceNobodyReadsWhatAFailedGroupSends) {
  const Api& api = simulated_api();
  exec::Ranks carriers(2);
  HostFunctionQueue functions(api);
  const OwnedStream stream(api);
  constexpr std::size_t kLong = 64 << 20;
  const Slotted layout{.units = 1, .slot_bytes = 16};
  const DeviceBytes long_one(kLong), slots(layout.bytes());
  HostMessages messages(api, carriers[0], 10, functions);
  std::uint32_t size = 17;
  const auto told = carriers[1].send(reinterpret_cast<std::byte*>(&size), sizeof size, 0, 10);
  messages.begin();
  messages.send(long_one.data(), kLong, 1, {});
  messages.receive(slots.data(), layout.bytes(), 1, {&layout, 1});
  messages.end(stream.get());
  api.synchronize(stream.get());
  EXPECT_THROW(messages.check(), TransportError);
  EXPECT_TRUE(messages.rest());
  EXPECT_THROW(carriers[0].check_failure(0), Aborted);
}

// A group behind a function of the host that does not end: its messages may not be destroyed, and
// travel no more when it is their turn.
TEST(HostMessages, AreLeftAloneWhereTheyCannotEnd) {
  const Api& api = simulated_api();
  exec::Ranks carriers(2);
  HostFunctionQueue functions(api);
  const OwnedStream before(api), stream(api);
  std::binary_semaphore over(0);
  functions.enqueue(
      before.get(), [](void* its) { static_cast<std::binary_semaphore*>(its)->acquire(); }, &over);
  std::unique_ptr<Messages> messages =
      std::make_unique<HostMessages>(api, carriers[0], 10, functions);
  std::uint32_t lost = 0;
  messages->set_loss_word(&lost);
  DeviceBytes bytes(8);
  messages->begin();
  messages->send(bytes.data(), 8, 1);
  messages->end(stream.get());
  EXPECT_FALSE(messages->rest());
  EXPECT_EQ(lost, kLost);
  over.release();
  api.synchronize(stream.get());
  EXPECT_THROW(messages->check(), Aborted);
  EXPECT_TRUE(messages->rest());
}

}  // namespace
}  // namespace gradwire::cuda
