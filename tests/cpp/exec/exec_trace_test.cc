// What a recorder keeps of a communicator's calls: order, times, bytes, waits, and what was
// dropped.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exec_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/exec/trace/recorder.h"

namespace gradwire::exec {
namespace exec_trace_test {

Event numbered(std::uint64_t number) {
  Event event;
  event.kind = EventKind::kSend;
  event.begin = number;
  event.plain = ~number;
  return event;
}

TEST(EventRing, KeepsTheLastEventsAndCountsTheOthers) {
  EventRing ring(100);
  EXPECT_EQ(ring.capacity(), 128U);
  std::uint64_t dropped = 99;
  EXPECT_TRUE(ring.read(dropped).empty());
  EXPECT_EQ(dropped, 0U);
  for (std::uint64_t i = 0; i < 100; ++i) ring.add(numbered(i));
  EXPECT_EQ(ring.read(dropped).size(), 100U);
  EXPECT_EQ(dropped, 0U);
  for (std::uint64_t i = 100; i < 1000; ++i) ring.add(numbered(i));
  const std::vector<Event> events = ring.read(dropped);
  EXPECT_EQ(dropped + events.size(), 1000U);
  EXPECT_EQ(events.size(), 127U);
  for (std::size_t i = 0; i < events.size(); ++i) EXPECT_EQ(events[i], numbered(dropped + i));
}

TEST(EventRing, IsReadWhileItIsWritten) {
  EventRing ring(16);
  std::jthread writer([&](const std::stop_token& stop) {
    for (std::uint64_t i = 0; !stop.stop_requested(); ++i) ring.add(numbered(i));
  });
  std::uint64_t dropped = 0;
  while (ring.added() < 100) std::this_thread::yield();
  for (int read = 0; read < 2000; ++read) {
    const std::vector<Event> events = ring.read(dropped);
    for (std::size_t i = 0; i < events.size(); ++i) ASSERT_EQ(events[i], numbered(dropped + i));
  }
}

struct Recorded {
  std::vector<std::shared_ptr<Recorder>> recorders;
  std::vector<Traffic> traffic;

  std::vector<Event> events(std::size_t rank) const { return recorders[rank]->read().events; }
};

// What ranks recorded of an all_reduce, which was made so many times.
Recorded record(int size, std::string_view algorithm, std::string_view codec_name, std::size_t n,
                int calls, bool feeds_back = false, std::size_t room = 4096) {
  Ranks ranks(size, "shm");
  Recorded out;
  out.traffic.resize(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) {
    out.recorders.push_back(std::make_shared<Recorder>(room));
    ranks[r].observe(out.recorders.back());
  }
  const auto codec = codec::make_codec(codec_name);
  ranks.run([&](Communicator& comm) {
    std::vector<float> x(n, 0.5F);
    const std::vector<codec::KeyedArray> keys = {{"layer.weight", n / 2},
                                                 {"layer.bias", n - n / 2}};
    const Array array = array_of(x);
    Request call;
    call.algorithm = algorithm;
    call.codec = codec;
    call.inputs = call.outputs = {&array, 1};
    const Array halves[] = {{array.data, n / 2}, {array.data + n / 2 * sizeof(float), n - n / 2}};
    if (feeds_back) {
      call.feedback = std::make_shared<codec::ErrorFeedback>();
      call.keys = keys;
      call.inputs = call.outputs = halves;
    }
    for (int i = 0; i < calls; ++i) comm.run(call);
    out.traffic[static_cast<std::size_t>(comm.identity().rank)] = comm.traffic();
  });
  return out;
}

std::vector<Event> of_kind(const std::vector<Event>& events, EventKind kind) {
  std::vector<Event> found;
  std::ranges::copy_if(events, std::back_inserter(found),
                       [=](const Event& each) { return each.kind == kind; });
  return found;
}

bool lies_within(const Event& inner, const Event& outer) {
  return inner.begin >= outer.begin && inner.begin + inner.duration <= outer.begin + outer.duration;
}

TEST(Recorder, NestsFramesInPhasesAndPhasesInCalls) {
  for (std::string_view codec : {"none", "onebit", "lowrank"}) {
    const Recorded all = record(3, "auto", codec, 5000, 3, codec != "none");
    for (std::size_t r = 0; r < 3; ++r) {
      const std::vector<Event> events = all.events(r);
      const auto calls = of_kind(events, EventKind::kCall);
      const auto phases = of_kind(events, EventKind::kPhase);
      ASSERT_EQ(calls.size(), 3U) << codec;
      EXPECT_GE(phases.size(), 3U);
      for (const Event& each : phases)
        EXPECT_EQ(std::ranges::count_if(calls, [&](auto& c) { return lies_within(each, c); }), 1);
      for (const EventKind kind : {EventKind::kSend, EventKind::kReceive, EventKind::kWait})
        for (const Event& each : of_kind(events, kind)) {
          const auto its = std::ranges::find(phases, each.operation, &Event::operation);
          ASSERT_NE(its, phases.end());
          EXPECT_TRUE(lies_within(each, *its)) << codec;
        }
      // Pieces of work and waits follow each other.
      std::uint64_t last = 0;
      for (const Event& each : events) {
        if (each.kind != EventKind::kSend && each.kind != EventKind::kReceive &&
            each.kind != EventKind::kWait)
          continue;
        if ((each.flags & kEventAgain) != 0) continue;  // a part of the one before
        EXPECT_GE(each.begin, last);
        last = each.begin + each.duration;
      }
    }
  }
}

TEST(Recorder, CountsTheBytesThatTheTrafficHas) {
  for (std::string_view algorithm : {"ring", "direct", "star", "binary_tree"})
    for (std::string_view codec : {"none", "onebit"}) {
      const Recorded all = record(3, algorithm, codec, 5000, 4, codec != "none");
      for (std::size_t r = 0; r < 3; ++r) {
        std::uint64_t sent = 0, called = 0, in_calls = 0;
        const auto events = all.events(r);
        for (const Event& each : of_kind(events, EventKind::kSend)) sent += each.bytes;
        for (const Event& each : of_kind(events, EventKind::kCall)) {
          called += each.plain;
          in_calls += each.bytes;
        }
        EXPECT_EQ(sent, all.traffic[r].bytes_sent) << algorithm << " " << codec;
        EXPECT_EQ(in_calls, sent);
        EXPECT_EQ(called, 4 * 5000 * sizeof(float));
      }
    }
}

TEST(Recorder, ChargesTheCodecsTimeToFrames) {
  const Recorded all = record(2, "ring", "onebit", 100'000, 2, /*feeds_back=*/true);
  std::uint64_t encode = 0, decode = 0;
  for (const Event& each : all.events(0)) {
    if (each.kind != EventKind::kSend && each.kind != EventKind::kReceive) continue;
    encode += each.encode;
    decode += each.decode;
    EXPECT_LE(each.encode + each.decode, each.duration + 1);
  }
  EXPECT_NEAR(static_cast<double>(encode) * 1e-9, all.traffic[0].codec.encode, 1e-6);
  EXPECT_NEAR(static_cast<double>(decode) * 1e-9, all.traffic[0].codec.decode, 1e-6);
}

TEST(Recorder, DescribesCallsAndPlans) {
  const Recorded all = record(2, "ring", "onebit", 5000, 2, /*feeds_back=*/true);
  const Recorder::Events found = all.recorders[1]->read();
  const auto calls = of_kind(found.events, EventKind::kCall);
  EXPECT_EQ(found.labels.at(calls[0].label),
            "all_reduce\nfloat32\nsum\nonebit\nlayer.weight\nlayer.bias");
  const auto phases = of_kind(found.events, EventKind::kPhase);
  EXPECT_NE(found.labels.at(phases[0].label).find("ring"), std::string::npos);
}

TEST(Recorder, KeepsTheLastEventsOfManyCalls) {
  const Recorded all = record(2, "ring", "none", 1000, 300, false, /*room=*/64);
  const Recorder::Events found = all.recorders[0]->read();
  EXPECT_GT(found.dropped, 1000U);
  const auto calls = of_kind(found.events, EventKind::kCall);
  ASSERT_FALSE(calls.empty());
  EXPECT_EQ(calls.back().operation, 299U);
}

TEST(Recorder, NamesTheRankThatIsWaitedForAtAFailure) {
  Ranks ranks(2);
  const auto recorder = std::make_shared<Recorder>(64);
  ranks[0].observe(recorder);
  std::vector<float> x(64, 1);
  const Array array = array_of(x);
  Request call;
  call.inputs = call.outputs = {&array, 1};
  call.timeout = 0.2;
  EXPECT_THROW(ranks[0].run(call), Timeout);
  const auto events = recorder->read().events;
  const auto waits = of_kind(events, EventKind::kWait);
  ASSERT_EQ(waits.size(), 1U);
  EXPECT_EQ(waits[0].peer, 1);
  EXPECT_GE(waits[0].duration, 100'000'000U);
  EXPECT_EQ(of_kind(events, EventKind::kCall).at(0).flags, kEventFailed);
}

TEST(Recorder, AddsItsSkewToEveryTime) {
  constexpr std::int64_t kSkew = 1'000'000'000'000;
  const auto times_with = [](std::int64_t skew) {
    Ranks ranks(1);
    const auto recorder = std::make_shared<Recorder>(64, skew);
    ranks[0].observe(recorder);
    std::vector<float> x(64, 1);
    const Array array = array_of(x);
    Request call;
    call.inputs = call.outputs = {&array, 1};
    ranks[0].run(call);
    return recorder->read().events;
  };
  const auto plain = times_with(0), skewed = times_with(kSkew);
  ASSERT_EQ(plain.size(), skewed.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    EXPECT_GE(skewed[i].begin, plain[i].begin + kSkew);
    EXPECT_LT(skewed[i].duration, static_cast<std::uint64_t>(kSkew) / 2);
  }
}

}  // namespace exec_trace_test
}  // namespace gradwire::exec
