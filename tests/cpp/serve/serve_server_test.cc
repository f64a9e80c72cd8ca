// Whole jobs over each transport: servers and clients with threads of their own.
#include <future>
#include <mutex>

#include "serve_job.h"

namespace gradwire::serve {
namespace serve_server_test {

// Posts a JOIN; without its end where it is not complete.
void send_join(Channel& channel, ClientId id, const std::string& text, bool complete = true) {
  MessageHeader header;
  header.op = Op::kJoin;
  header.client = id;
  for (std::size_t at = 0; at < text.size(); at += kMostPayload) {
    const std::string part = text.substr(at, kMostPayload);
    const bool last = complete && at + part.size() == text.size();
    header.flags = static_cast<std::uint8_t>((at == 0 ? kFirst : 0) | (last ? kLast : 0));
    channel.post(header, std::as_bytes(std::span(part)));
  }
}

// Joins with a table's text, and returns why that is refused.
std::string refusal_of_join(Channel& channel, ClientId id, const std::string& text) {
  send_join(channel, id, text);
  for (const Deadline deadline = soon(); !deadline.passed(); std::this_thread::yield()) {
    channel.send_queued();
    if (const auto message = channel.next()) {
      EXPECT_TRUE(message->header.has(kRefused));
      return std::string(text_of(message->payload));
    }
  }
  return "";
}

class ServeConformance : public testing::TestWithParam<const char*> {
 protected:
  void start(std::uint32_t shards, Client& client, const Arrays& x) {
    job_.wait(client.join(soon()));
    job_.wait(client.set(spans_of<Gradients>(x), soon()));
    EXPECT_EQ(client.versions(), std::vector<std::uint64_t>(shards, 0));
  }
  void push(Client& client, const Arrays& g, const std::string& codec = "none") {
    job_.wait(client.push(spans_of<Gradients>(g), {.codec = codec}, soon(), soon()));
  }
  Arrays pull(Client& client, const std::string& codec = "none") {
    Arrays out = zeros_of(client.table());
    job_.wait(client.pull(spans_of<Values>(out), codec, soon()));
    return out;
  }

  Job job_{2, GetParam(), /*threads=*/true};
  ParameterTable table_ = some_table(2);
};

TEST_P(ServeConformance, TrainsTwoClients) {
  const auto a = job_.connect(table_, 0), b = job_.connect(table_, 1);
  const Arrays x = random_of(table_, 1), g = random_of(table_, 2);
  start(2, *a, x);
  job_.wait(b->join(soon()));
  const Arrays other = random_of(table_, 3);
  const auto set = b->set(spans_of<Gradients>(other), soon());
  job_.wait(set);
  EXPECT_EQ(set->refusals(), 2U);
  EXPECT_EQ(pull(*b), x);
  push(*a, g);
  push(*b, g);
  const Arrays w = pull(*a);
  EXPECT_EQ(w, pull(*b));
  for (std::size_t p = 0; p < w.size(); ++p)
    for (std::size_t i = 0; i < w[p].size(); ++i)
      ASSERT_EQ(w[p][i], std::fma(-0.5F, g[p][i], std::fma(-0.5F, g[p][i], x[p][i])));
  EXPECT_EQ(a->versions(), (std::vector<std::uint64_t>{2, 2}));
}

TEST_P(ServeConformance, PullsWithEveryCodec) {
  const auto a = job_.connect(table_, 0);
  start(2, *a, random_of(table_, 1));
  for (const std::string& codec : table_.codecs) {
    push(*a, random_of(table_, 4), codec);
    const Arrays once = pull(*a, codec), exact = pull(*a);
    double apart = 0, all = 0;
    for (std::size_t p = 0; p < once.size(); ++p)
      for (std::size_t i = 0; i < once[p].size(); ++i) {
        apart += std::abs(double{once[p][i]} - double{exact[p][i]});
        all += std::abs(double{exact[p][i]});
      }
    EXPECT_LT(apart / all, 0.5) << codec;
  }
}

TEST_P(ServeConformance, AStoppedClientHoldsNobodyUp) {
  const auto a = job_.connect(table_, 0), b = job_.connect(table_, 1);
  start(2, *a, random_of(table_, 1));
  {
    // A client that asks for everything again and again, and never reads.
    Pair stopped = channels(GetParam(), "replica z");
    job_.servers[0]->admit(std::move(stopped.server), id_of(25));
    MessageHeader header;
    header.op = Op::kJoin;
    header.client = id_of(25);
    const std::string text = table_.text();
    stopped.client->post(header, std::as_bytes(std::span(text)));
    header.op = Op::kPull;
    header.table = table_.mark();
    for (int i = 0; i < 8; ++i) stopped.client->post(header);
    stopped.client->send_queued();
    stopped.client->flush();
    job_.wait(b->join(soon()));
    for (unsigned i = 0; i < 20; ++i) {
      push(*a, random_of(table_, i));
      pull(*b);
    }
  }
  pull(*a);  // and it is gone
  EXPECT_EQ(a->versions()[0], 20U);
}

TEST_P(ServeConformance, AClientThatLeavesEndsItsChannelsAlone) {
  const auto a = job_.connect(table_, 0);
  auto b = job_.connect(table_, 1);
  start(2, *a, random_of(table_, 1));
  job_.wait(b->join(soon()));
  for (auto& each : job_.servers) each->admit(channels(GetParam(), "replica q").server, id_of(9));
  b->close(soon());
  push(*a, random_of(table_, 2));
  std::string text;
  for (const Deadline deadline = soon(); !deadline.passed();) {
    const auto stats = a->ask(Op::kStats, 0, soon());
    job_.wait(stats);
    text = stats->texts()[0];
    if (text.find("\"clients\": [\"replica a\"]") != std::string::npos) break;
  }
  EXPECT_NE(text.find("\"clients\": [\"replica a\"], \"gone\": []"), std::string::npos) << text;
}

TEST_P(ServeConformance, AServersEndNamesTheShard) {
  const auto a = job_.connect(table_, 0);
  start(2, *a, random_of(table_, 1));
  const auto call = a->ask(Op::kWait, 1000, soon());
  job_.servers[1]->stop();
  try {
    job_.wait(call);
    ADD_FAILURE();
  } catch (const TransportError& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("shard 1: ")) << error.what();
  }
  EXPECT_THROW(a->join(soon()), TransportError);
}

INSTANTIATE_TEST_SUITE_P(All, ServeConformance, testing::ValuesIn(kAllTransports));

class Serving : public testing::Test {
 protected:
  Job job_{2, "inproc", /*threads=*/true};
  ParameterTable table_ = some_table(2);
};

TEST_F(Serving, RefusesAnotherTableAndNamesTheParameter) {
  const auto a = job_.connect(table_, 0);
  job_.wait(a->join(soon()));
  ParameterTable other = table_;
  other.parameters[1].shape = {32, 64};
  const auto b = job_.connect(other, 1);
  try {
    job_.wait(b->join(soon()));
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what())
                  .find("parameter 1 is 'layer.weight' (32x64), not 'layer.weight' (64x32)"),
              std::string::npos)
        << error.what();
  }
  job_.wait(a->set(spans_of<Gradients>(zeros_of(table_)), soon()));
}

TEST_F(Serving, AHostileClientLosesItsOwnChannelAlone) {
  const auto a = job_.connect(table_, 0);
  job_.wait(a->join(soon()));
  const Arrays x = random_of(table_, 1);
  job_.wait(a->set(spans_of<Gradients>(x), soon()));
  const auto ends = [&](int client, auto change, int times = 1) {
    Pair pair = channels("inproc", "replica z");
    job_.servers[0]->admit(std::move(pair.server), id_of(client));
    MessageHeader header;
    header.op = Op::kJoin;
    header.client = id_of(client);
    const std::string text = table_.text();
    pair.client->post(header, std::as_bytes(std::span(text)));
    header.op = Op::kPull;
    header.table = table_.mark();
    change(header);
    for (int i = 0; i < times; ++i) pair.client->post(header);
    for (const Deadline deadline = soon(); !pair.client->ended() && !deadline.passed();) {
      pair.client->send_queued();
      pair.client->arm();
      if (pair.client->next()) pair.client->release();
      pair.client->disarm();
      std::this_thread::yield();
    }
    EXPECT_TRUE(pair.client->ended());
  };
  ends(5, [](MessageHeader& h) { h.codec = 99; });
  ends(6, [](MessageHeader& h) { h.codec = 3, h.extra = 1; });
  ends(7, [](MessageHeader& h) { h.client = id_of(0); });
  ends(8, [](MessageHeader& h) { h.table ^= 1; });
  ends(9, [](MessageHeader& h) { h.flags = kFirst | kLast | kReply; });
  ends(10, [](MessageHeader& h) { h.op = Op::kPush; });
  // Two more than may be asked for at a time, in a message each.
  ends(11, [](MessageHeader& h) { h.op = Op::kSnapshot; }, 66);
  EXPECT_NE(job_.servers[0]->statistics(soon()).find("replica z: pull: there is no such codec"),
            std::string::npos);
  Arrays out = zeros_of(table_);
  job_.wait(a->pull(spans_of<Values>(out), "none", soon()));
  EXPECT_EQ(out, x);
}

TEST_F(Serving, QuotesOnlyTheFrontOfWhatAClientSends) {
  Pair pair = channels("inproc", "replica z");
  job_.servers[0]->admit(std::move(pair.server), id_of(5));
  const std::string why =
      refusal_of_join(*pair.client, id_of(5),
                      "gradwire parameters 1\nparameter 1 a\nrule " + std::string(200'000, 'r'));
  EXPECT_TRUE(why.starts_with("unknown rule 'rrrr")) << pair.client->why();
  EXPECT_LE(why.size(), 1000U);
}

TEST_F(Serving, AClosingClientWaitsForItsPushes) {
  const auto a = job_.connect(table_, 0), b = job_.connect(table_, 1);
  job_.wait(a->join(soon()));
  job_.wait(a->set(spans_of<Gradients>(zeros_of(table_)), soon()));
  std::vector<std::shared_ptr<ClientCall>> calls;
  const Arrays g = random_of(table_, 1);
  for (int i = 0; i < 5; ++i) calls.push_back(a->push(spans_of<Gradients>(g), {}, soon(), soon()));
  a->close(soon());
  for (const auto& each : calls) EXPECT_NO_THROW(each->work().rethrow());
  job_.wait(b->join(soon()));
  Arrays out = zeros_of(table_);
  job_.wait(b->pull(spans_of<Values>(out), "none", soon()));
  EXPECT_NEAR(out[0][0], -0.5F * 5 * g[0][0], 1e-4);
}

TEST(Server, EndsChannelsThatComeWhenItIsStopped) {
  Server server({0, 1, nullptr});
  Pair before = channels("inproc"), after = channels("inproc");
  server.admit(std::move(before.server), id_of(0));
  server.stop();
  server.admit(std::move(after.server), id_of(1));
  for (Channel* each : {before.client.get(), after.client.get()}) {
    for (const Deadline deadline = Deadline::after(1); !each->ended() && !deadline.passed();) {
      each->arm();
      EXPECT_FALSE(each->next().has_value());
      each->disarm();
    }
    EXPECT_TRUE(each->ended());
  }
}

TEST_F(Serving, ANewerIncarnationReplacesAnOlderOne) {
  const auto old = job_.connect(table_, 0, 1);
  job_.wait(old->join(soon()));
  const auto again = job_.connect(table_, 0, 2);
  job_.wait(again->join(soon()));
  EXPECT_THROW(job_.wait(old->ask(Op::kWait, 9, soon())), TransportError);
  const auto late = job_.connect(table_, 0, 1);
  EXPECT_THROW(job_.wait(late->join(soon())), TransportError);
  job_.wait(again->set(spans_of<Gradients>(zeros_of(table_)), soon()));
}

TEST_F(Serving, PullsAndWaitsLastUntilThereAreValues) {
  const auto a = job_.connect(table_, 0), b = job_.connect(table_, 1);
  job_.wait(a->join(soon()));
  job_.wait(b->join(soon()));
  Arrays out = zeros_of(table_);
  const Arrays x = random_of(table_, 1);
  const auto pull = a->pull(spans_of<Values>(out), "none", soon());
  const auto wait = a->ask(Op::kWait, 2, soon());
  EXPECT_FALSE(pull->work().wait_for(0.02));
  job_.wait(b->set(spans_of<Gradients>(x), soon()));
  job_.wait(pull);
  EXPECT_EQ(out, x);
  EXPECT_FALSE(wait->work().done());
  for (unsigned i = 0; i < 2; ++i) job_.wait(b->push(spans_of<Gradients>(x), {}, soon(), soon()));
  job_.wait(wait);
}

TEST_F(Serving, AClientWithoutMemoryIsEndedAlone) {
  int frames = 0;
  job_.servers[0]->log_frames([&](const AppliedFrame& frame) {
    if (frame.client == id_of(1) && ++frames == 2) throw std::bad_alloc();
  });
  const auto a = job_.connect(table_, 0), b = job_.connect(table_, 1);
  const Arrays x = random_of(table_, 1);
  job_.wait(a->join(soon()));
  job_.wait(a->set(spans_of<Gradients>(x), soon()));
  job_.wait(b->join(soon()));
  EXPECT_THROW(job_.wait(b->push(spans_of<Gradients>(x), {}, soon(), soon())), TransportError);
  job_.wait(a->push(spans_of<Gradients>(x), {}, soon(), soon()));
  const std::string text = job_.servers[0]->statistics(soon());
  EXPECT_NE(text.find("\"gone\": [\"replica b: the server has no memory for what it asks for\"]"),
            std::string::npos)
      << text;
}

TEST(Server, AnswersAllWhoAskWhileItIsStopped) {
  for (int round = 0; round < 20; ++round) {
    Server server({0, 1, nullptr});
    server.start();
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i)
      threads.emplace_back([&server] {
        for (int asked = 0; asked < 50; ++asked)
          EXPECT_NO_THROW(server.census(Deadline::after(transport::kTestSeconds)));
      });
    server.census(soon());
    server.stop();
    for (auto& each : threads) each.join();
  }
}

TEST(Server, RefusesATableThatIsLargerThanItsMemory) {
  Job job(0, "inproc", /*threads=*/true);
  job.servers.push_back(
      std::make_unique<Server>(Server::Options{.log = nullptr, .memory = 3ULL << 28}));
  job.servers.back()->start();
  // What a client allocates for such a table is little: it sends the text alone.
  ParameterTable table = some_table(1, "adagrad:rate=0.5");
  table.parameters = {{"embedding", {1 << 14, 1 << 14}}};
  Pair pair = channels("inproc");
  job.servers[0]->admit(std::move(pair.server), id_of(0));
  const std::string why = refusal_of_join(*pair.client, id_of(0), table.text());
  EXPECT_EQ(
      why,
      "the parameters of shard 0, with the state of their rule and a push, take 3 GiB, and its "
      "server may use 0.75 GiB: start more shards, on more hosts");
  ParameterTable wide = some_table(1, "staged");
  wide.codecs = {"none"};
  wide.dtype = DType::kFloat64;
  wide.parameters = {{"embedding", {1 << 14, 1 << 13}}};
  Pair other = channels("inproc");
  job.servers[0]->admit(std::move(other.server), id_of(2));
  const std::string too_wide = refusal_of_join(*other.client, id_of(2), wide.text());
  EXPECT_NE(too_wide.find("take 1 GiB"), std::string::npos) << too_wide;
  const auto a = job.connect(some_table(), 1);
  job.wait(a->join(soon()));
}

TEST_F(Serving, ForgetsTextsOfThoseWhoNeverJoin) {
  // Three that begin with as much as one may send; there is room for two.
  const std::string text(kMostTableText, 'x');
  std::vector<std::unique_ptr<Channel>> idle;
  for (int i = 0; i < 3; ++i) {
    Pair pair = channels("inproc", "replica " + std::to_string(i));
    job_.servers[0]->admit(std::move(pair.server), id_of(5 + i));
    send_join(*pair.client, id_of(5 + i), text, /*complete=*/false);
    idle.push_back(std::move(pair.client));
  }
  for (const Deadline deadline = soon(); !idle[0]->ended() && !deadline.passed();) {
    for (auto& each : idle) {
      each->arm();
      each->next();
      each->disarm();
      each->send_queued();
    }
  }
  EXPECT_TRUE(idle[0]->ended());
  EXPECT_FALSE(idle[2]->ended());
  const auto a = job_.connect(table_, 0);
  job_.wait(a->join(soon()));
}

TEST(Server, EndsAClientThatDoesNotFinishItsJoin) {
  Job job(0, "inproc", /*threads=*/true);
  std::promise<std::string> said;
  Server::Options options{.log = [&](std::string_view line) { said.set_value(std::string(line)); }};
  options.join_seconds = 0.05;
  job.servers.push_back(std::make_unique<Server>(std::move(options)));
  job.servers.back()->start();
  Pair pair = channels("inproc", "replica h");
  job.servers[0]->admit(std::move(pair.server), id_of(0));
  send_join(*pair.client, id_of(0), some_table().text(), /*complete=*/false);
  pair.client->send_queued();
  pair.client->flush();
  auto line = said.get_future();
  ASSERT_EQ(line.wait_for(std::chrono::duration<double>(transport::kTestSeconds)),
            std::future_status::ready);
  EXPECT_EQ(line.get(), "replica h: join: the rest of its table did not come in time");
}

TEST(Server, TellsOfAClientOnceForAllShards) {
  std::vector<std::string> lines[2];
  std::mutex mutex;
  Job job(0, "inproc", /*threads=*/true);
  for (std::uint32_t i = 0; i < 2; ++i) {
    const auto log = [&, i](std::string_view line) {
      const std::lock_guard lock(mutex);
      lines[i].emplace_back(line);
    };
    job.servers.push_back(std::make_unique<Server>(Server::Options{i, 2, log}));
    job.servers.back()->start();
  }
  const ParameterTable table = some_table(2);
  const auto a = job.connect(table, 0);
  job.wait(a->join(soon()));
  for (auto& each : job.servers) each->admit(channels("inproc", "replica b").server, id_of(1));
  a->close(soon());
  const auto all_left = [&] {
    return std::ranges::all_of(job.servers, [](auto& each) {
      const Server::Census census = each->census(soon());
      return census.joined == 0 && census.admitted == 2;
    });
  };
  for (const Deadline deadline = soon(); !all_left() && !deadline.passed();)
    std::this_thread::yield();
  ASSERT_TRUE(all_left());
  const std::lock_guard lock(mutex);
  std::ranges::sort(lines[0]);
  ASSERT_EQ(lines[0].size(), 3U);
  EXPECT_EQ(lines[0][0], "replica a: joined");
  EXPECT_EQ(lines[0][1], "replica a: left");
  EXPECT_TRUE(lines[0][2].starts_with("replica b: ")) << lines[0][2];
  EXPECT_TRUE(lines[1].empty()) << lines[1][0];
}

TEST_F(Serving, WritesASnapshotAndGoesOnFromIt) {
  const auto a = job_.connect(table_, 0);
  const Arrays x = random_of(table_, 1);
  job_.wait(a->join(soon()));
  EXPECT_THROW(job_.servers[0]->snapshot(soon()), InvalidArgument);
  job_.wait(a->set(spans_of<Gradients>(x), soon()));
  const auto asked = a->ask(Op::kSnapshot, 0, soon());
  std::vector<Snapshot> snapshots;
  for (auto& each : job_.servers) {
    const auto ticket = each->snapshot_wanted(transport::kTestSeconds);
    ASSERT_TRUE(ticket.has_value());
    snapshots.push_back(each->snapshot(soon()));
    each->snapshot_written(*ticket, "");
  }
  job_.wait(asked);
  Job again(0, "inproc", true);
  for (std::uint32_t i = 0; i < 2; ++i) {
    again.servers.push_back(std::make_unique<Server>(Server::Options{i, 2, nullptr}, snapshots[i]));
    again.servers.back()->start();
  }
  const auto b = again.connect(table_, 1);
  again.wait(b->join(soon()));
  Arrays out = zeros_of(table_);
  again.wait(b->pull(spans_of<Values>(out), "none", soon()));
  EXPECT_EQ(out, x);
  EXPECT_THROW(Server(Server::Options{0, 2, nullptr}, snapshots[1]), InvalidArgument);
}

}  // namespace serve_server_test
}  // namespace gradwire::serve
