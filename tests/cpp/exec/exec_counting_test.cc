// What a communicator's calls, messages, waits and failures add up to.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exec_ranks.h"
#include "gradwire/base/error.h"
#include "gradwire/exec/trace/counting.h"
#include "gradwire/exec/trace/recorder.h"

namespace gradwire::exec {
namespace exec_counting_test {

using All = std::vector<std::shared_ptr<Totals>>;

All observed(Ranks& ranks, const std::shared_ptr<Observer>& next = nullptr) {
  All all;
  for (int r = 0; r < ranks.size(); ++r) {
    all.push_back(std::make_shared<Totals>(ranks.size()));
    ranks[r].observe(std::make_shared<Counting>(all.back(), next));
  }
  return all;
}

void all_reduce(Communicator& comm, std::string_view codec, std::size_t elements = 1000) {
  std::vector<float> x(elements, 1);
  const Array array = array_of(x);
  Request call;
  call.codec = codec::make_codec(codec);
  call.inputs = call.outputs = {&array, 1};
  comm.run(call);
}

TEST(Counting, AddsUpCallsByCollectiveAndCodec) {
  Ranks ranks(2);
  const All all = observed(ranks);
  ranks.run([&](Communicator& comm) {
    for (int i = 0; i < 3; ++i) all_reduce(comm, "none");
    all_reduce(comm, "fp16");
  });
  for (int r = 0; r < 2; ++r) {
    const auto calls = all[at(r)]->calls();
    ASSERT_EQ(calls.size(), 2U);
    EXPECT_EQ(calls[0].codec, "none");
    EXPECT_EQ(calls[0].counts->calls.read(), 3U);
    EXPECT_EQ(calls[0].counts->input_bytes.read(), 3U * 4000);
    EXPECT_EQ(calls[1].codec, "fp16");
    EXPECT_EQ(calls[1].counts->calls.read(), 1U);
    EXPECT_EQ(calls[1].counts->failed.read(), 0U);
    EXPECT_GT(calls[1].counts->nanoseconds.read(), 0U);
    const auto sent = calls[0].counts->sent_bytes.read() + calls[1].counts->sent_bytes.read();
    EXPECT_EQ(sent, ranks[r].traffic().bytes_sent);
    EXPECT_EQ(sent, all[at(r)]->peers[at(1 - r)].sent_bytes.read());
    EXPECT_EQ(sent, all[at(1 - r)]->peers[at(r)].received_bytes.read());
    EXPECT_FALSE(all[at(r)]->failure());
  }
}

TEST(Counting, ChargesAWaitToWhoCameLate) {
  constexpr auto kLate = std::chrono::milliseconds(250);  // later than busy processors make others
  Ranks ranks(3);
  const All all = observed(ranks);
  ranks.run([&](Communicator& comm) {
    all_reduce(comm, "none");
    if (comm.identity().rank == 2) std::this_thread::sleep_for(kLate);
    std::vector<float> x(8, 1);
    const Array array = array_of(x);
    Request call;
    call.algorithm = "direct";
    call.inputs = call.outputs = {&array, 1};
    comm.run(call);
  });
  const auto waited = [&](int r, int peer) {
    return static_cast<double>(all[at(r)]->peers[at(peer)].late_nanoseconds.read()) / 1e9;
  };
  EXPECT_GT(waited(0, 2), 0.02);
  EXPECT_GT(waited(1, 2), 0.02);
  EXPECT_GT(waited(0, 2), waited(0, 1));
}

TEST(Counting, CountsMessages) {
  Ranks ranks(2);
  const All all = observed(ranks);
  ranks.run([&](Communicator& comm) {
    std::vector<std::byte> data(200'000);  // of several frames
    const auto work = comm.identity().rank == 0 ? comm.send(data.data(), data.size(), 1, 10)
                                                : comm.receive(data.data(), data.size(), 0, 10);
    comm.wait(*work, 10);
  });
  const Totals::Peer& sent = all[0]->peers[1];
  EXPECT_EQ(sent.sends.read(), 1U);
  EXPECT_EQ(sent.receives.read(), 0U);
  EXPECT_GT(sent.sent_bytes.read(), 200'000U);
  EXPECT_EQ(all[1]->peers[0].receives.read(), 1U);
  EXPECT_EQ(all[1]->peers[0].received_bytes.read(), sent.sent_bytes.read());
}

TEST(Counting, PassesOnWhatItIsTold) {
  Ranks ranks(2);
  const auto recorder = std::make_shared<Recorder>(64);
  const auto totals = std::make_shared<Totals>(2);
  ranks[0].observe(std::make_shared<Counting>(totals, recorder));
  ranks.run([&](Communicator& comm) { all_reduce(comm, "none"); });
  const Recorder::Events found = recorder->read();
  ASSERT_FALSE(found.events.empty());
  EXPECT_TRUE(std::ranges::any_of(found.events, [](const Event& each) {
    return each.kind == EventKind::kCall && each.plain == 4000;
  }));
  EXPECT_EQ(totals->calls().size(), 1U);
}

TEST(Counting, NamesTheFailure) {
  Ranks ranks(2);
  const All all = observed(ranks);
  ranks.run([&](Communicator& comm) {
    if (comm.identity().rank == 1) return comm.abort("enough");
    EXPECT_THROW(all_reduce(comm, "none"), Aborted);
  });
  for (const auto& each : all) {
    ASSERT_TRUE(each->failure());
    EXPECT_EQ(each->failure()->kind, transport::FailureKind::kAborted);
    EXPECT_EQ(each->failure()->job_peer, 1);
  }
  EXPECT_EQ(all[0]->calls()[0].counts->failed.read(), 1U);
}

TEST(Totals, CallsCodecsForWhichThereIsNoRoomOther) {
  Totals totals(1);
  Request call;
  std::uint32_t last = 0;
  for (std::size_t i = 0; i < 2 * Totals::kMostSeries; ++i) {
    const std::string label = "codec" + std::to_string(i);
    call.codec_label = label;
    last = totals.series_of(call);
    ASSERT_EQ(totals.series_of(call), last);
  }
  ASSERT_LT(last, Totals::kMostSeries);
  totals.calls(last).calls.add(2);
  ASSERT_EQ(totals.calls().size(), 1U);
  EXPECT_EQ(totals.calls()[0].codec, "other");
  call.codec_label = "codec3";
  EXPECT_NE(totals.series_of(call), last);
}

}  // namespace exec_counting_test
}  // namespace gradwire::exec
