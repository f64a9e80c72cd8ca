// What a client does by itself: it merges, waits, gives back, times out. Driven by turn(), so that
// nothing depends on time.
#include <cmath>
#include <limits>

#include "serve_job.h"

namespace gradwire::serve {
namespace serve_client_test {

class Clients : public testing::Test {
 protected:
  void SetUp() override { start(some_table(2)); }
  void start(const ParameterTable& table) {
    table_ = table;
    client_.reset();
    job_ = std::make_unique<Job>(table.shards, "inproc", /*threads=*/false);
    client_ = job_->connect(table_, 0);
    wait(client_->join(soon()));
    wait(client_->set(spans_of<Gradients>(zeros_of(table_)), soon()));
  }
  void wait(const std::shared_ptr<ClientCall>& call) { job_->wait(call, {client_.get()}); }
  std::shared_ptr<ClientCall> push(const Arrays& g, PushOptions options = {}) {
    return client_->push(spans_of<Gradients>(g), options, Deadline::at_once(), soon());
  }
  Arrays pull() {
    Arrays out = zeros_of(table_);
    wait(client_->pull(spans_of<Values>(out), "none", soon()));
    return out;
  }
  // The bytes of requests that shard 0 has received.
  std::size_t received() {
    const std::string text = job_->servers[0]->statistics(soon());
    const std::string field = "\"received\": ";
    return std::stoul(text.substr(text.find(field) + field.size()));
  }
  // Each element's sum over all arrays.
  static std::vector<double> total(const std::vector<Arrays>& all) {
    std::vector<double> sum;
    for (const Arrays& arrays : all) {
      std::size_t at = 0;
      for (const auto& each : arrays)
        for (const float x : each) {
          if (sum.size() == at) sum.push_back(0);
          sum[at++] += double{x};
        }
    }
    return sum;
  }

  const codec::FloatEnvironment environment_;
  ParameterTable table_;
  std::unique_ptr<Job> job_;
  std::unique_ptr<Client> client_;
};

TEST_F(Clients, MergesPushesWhileTwoAreNotAcknowledged) {
  std::vector<Arrays> g;
  for (unsigned i = 0; i < 6; ++i) g.push_back(random_of(table_, i));
  std::vector<std::shared_ptr<ClientCall>> calls;
  for (const Arrays& each : g) calls.push_back(push(each));
  EXPECT_EQ(client_->merged(), 4U);
  for (std::size_t i = 3; i < 6; ++i) EXPECT_EQ(calls[i], calls[2]);
  wait(calls[5]);
  EXPECT_EQ(calls[5]->versions(), (std::vector<std::uint64_t>{3, 3}));
  const auto expected = total(g);
  const auto w = total({pull()});
  for (std::size_t i = 0; i < w.size(); ++i) ASSERT_NEAR(w[i], -0.5 * expected[i], 1e-5);
}

TEST_F(Clients, WaitsWhereMergingWouldMixOptionsOrIsUnwanted) {
  const Arrays g = random_of(table_, 1);
  std::vector<std::shared_ptr<ClientCall>> calls;
  for (int i = 0; i < 3; ++i) calls.push_back(push(g));
  EXPECT_THROW(push(g, {.codec = "fp16"}), Timeout);
  EXPECT_THROW(push(g, {.strict = true}), Timeout);
  wait(calls[2]);
  const auto late = push(g, {.strict = true});
  wait(late);
  EXPECT_EQ(client_->merged(), 1U);
  EXPECT_EQ(late->versions()[0], 4U);
}

TEST_F(Clients, GivesRefusedPushesBackToTheResiduals) {
  ParameterTable table = some_table(2);
  table.max_staleness = 0;
  start(table);
  const auto feedback = std::make_shared<codec::ErrorFeedback>();
  const std::string codec = table.codecs[4];
  const Arrays g = random_of(table_, 1), h = random_of(table_, 2);
  wait(push(g, {.codec = codec, .feedback = feedback}));
  const auto stale = push(h, {.codec = codec, .feedback = feedback});
  wait(stale);
  EXPECT_EQ(stale->refusals(), 2U);
  EXPECT_EQ(client_->stale(), 2U);
  Arrays left;
  for (const Parameter& each : table_.parameters) left.push_back(feedback->residual(each.name));
  Arrays applied = pull();
  for (auto& each : applied)
    for (float& x : each) x /= -0.5F;
  const auto all = total({left, applied}), expected = total({g, h});
  for (std::size_t i = 0; i < all.size(); ++i) ASSERT_NEAR(all[i], expected[i], 1e-5);
}

TEST_F(Clients, GivesARefusedPartBackThoughTheOtherShardNeverAnswers) {
  ParameterTable table = some_table(2);
  table.max_staleness = 0;
  start(table);
  const auto feedback = std::make_shared<codec::ErrorFeedback>();
  const PushOptions options{.codec = table.codecs[4], .feedback = feedback};
  const auto residuals = [&] {
    Arrays left;
    for (const Parameter& each : table_.parameters) left.push_back(feedback->residual(each.name));
    return left;
  };
  wait(push(random_of(table_, 1), options));
  const Arrays before = residuals(), h = random_of(table_, 2);
  const auto stale = push(h, options);
  for (const Deadline deadline = soon(); client_->stale() == 0 && !deadline.passed();) {
    client_->turn();
    job_->servers[0]->turn();
  }
  client_->close(Deadline::at_once());
  EXPECT_THROW(stale->work().rethrow(), Aborted);
  const auto left = total({residuals()}), expected = total({before, h});
  const std::size_t first_shard = ShardLayout(table_, codecs_of(table_), 0).elements();
  for (std::size_t i = 0; i < first_shard; ++i) ASSERT_NEAR(left[i], expected[i], 1e-5) << i;
}

TEST_F(Clients, RefuseNaNBeforeItTouchesResiduals) {
  const auto feedback = std::make_shared<codec::ErrorFeedback>();
  const PushOptions options{.codec = table_.codecs[4], .feedback = feedback};
  wait(push(random_of(table_, 1), options));
  const std::string& name = table_.parameters[4].name;
  const auto before = feedback->residual(name);
  Arrays g = random_of(table_, 2);
  g[4].back() = std::nanf("");
  try {
    wait(push(g, options));
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "push: the gradient of 'head' holds NaN or Inf; nothing was sent");
  }
  EXPECT_TRUE(same_bits(feedback->residual(name), before));
}

// Several parameters share a frame, so that frames mix codecs, too.
TEST_F(Clients, MixCodecsByParameter) {
  const auto feedback = std::make_shared<codec::ErrorFeedback>();
  PushOptions options{.feedback = feedback};
  for (std::size_t i = 0; i < table_.parameters.size(); ++i)
    options.codecs.push_back(table_.codecs[i == 1 || i == 2 ? 0 : 4 + i % 3]);
  const Arrays g = random_of(table_, 1);
  wait(push(g, options));
  const Arrays w = pull();
  for (const std::size_t i : {1, 2})
    for (std::size_t k = 0; k < g[i].size(); ++k) ASSERT_EQ(w[i][k], -0.5F * g[i][k]);
  for (const std::size_t i : {0, 3, 4}) {
    const auto left = feedback->residual(table_.parameters[i].name);
    for (std::size_t k = 0; k < g[i].size(); ++k)
      ASSERT_NEAR(w[i][k] / -0.5F + left[k], g[i][k], 1e-5);
  }
  options.codecs.pop_back();
  EXPECT_THROW(push(g, options), InvalidArgument);
}

TEST_F(Clients, RefuseARateThatIsNotFinite) {
  const Arrays g = random_of(table_, 1);
  EXPECT_THROW(push(g, {.rate = std::nanf("")}), InvalidArgument);
  EXPECT_THROW(push(g, {.rate = -std::numeric_limits<float>::infinity()}), InvalidArgument);
  wait(push(g));
}

TEST_F(Clients, SendFewFramesAheadWhereSmallRequestsAreMade) {
  ParameterTable table;
  table.parameters = {{"w", {400'000}}};
  start(table);
  const std::size_t frame = sizeof(MessageHeader) + kMostFrame * sizeof(float);
  // Returns how many frames of a push go out at most while the shard reads nothing.
  const auto under_way = [&] {
    const std::size_t before = received();
    const Arrays g = zeros_of(table_);
    const auto call = push(g);
    for (int turns = 0; turns < 20; ++turns) client_->turn();
    for (int turns = 0; turns < 20; ++turns) job_->servers[0]->turn();
    const std::size_t bytes = received() - before;
    EXPECT_EQ(bytes % frame, 0U);
    wait(call);
    return bytes / frame;
  };
  EXPECT_EQ(under_way(), static_cast<std::size_t>(kWindow));
  wait(client_->ask(Op::kWait, 0, soon()));
  EXPECT_EQ(under_way(), 2U);
  for (int pushes = 0; pushes < 10; ++pushes) under_way();
  EXPECT_EQ(under_way(), static_cast<std::size_t>(kWindow));
}

TEST_F(Clients, MakeAnyNumberOfPulls) {
  std::vector<Arrays> out(30, zeros_of(table_));
  std::vector<std::shared_ptr<ClientCall>> calls;
  for (const Arrays& each : out)
    calls.push_back(client_->pull(spans_of<Values>(each), "none", soon()));
  for (const auto& each : calls) wait(each);
}

TEST_F(Clients, DropTheirWaitsThatAreTooLate) {
  std::vector<std::shared_ptr<ClientCall>> late;
  for (int i = 0; i < 200; ++i) {  // many more than a shard keeps for one client
    late.push_back(client_->ask(Op::kWait, 1000, Deadline::at_once()));
    EXPECT_THROW(wait(late.back()), Timeout);
  }
  const auto counts = client_->ask(Op::kStats, 0, soon());
  wait(counts);
  EXPECT_NE(counts->texts()[0].find("\"clients\": [\"replica a\"]"), std::string::npos);
}

// Nothing of them is applied, so they are no versions for others to wait for; what residuals keep
// of them comes whole with the next push, which is one.
TEST_F(Clients, MakeNoVersionsOfPushesThatAreCutOff) {
  const auto other = job_->connect(table_, 1);
  job_->wait(other->join(soon()), {other.get()});
  const auto waits = other->ask(Op::kWait, 1, soon());
  const PushOptions options{.feedback = std::make_shared<codec::ErrorFeedback>()};
  const Arrays g = random_of(table_, 1);
  for (int i = 0; i < 2; ++i) {  // each sends its first frames, and then it is over
    const auto late = client_->push(spans_of<Gradients>(g), options, soon(), Deadline::at_once());
    client_->turn();
    EXPECT_THROW(late->work().rethrow(), Timeout);
  }
  for (int turns = 0; turns < 100; ++turns) {
    for (auto& each : job_->servers) each->turn();
    other->turn();
  }
  EXPECT_FALSE(waits->work().done());
  wait(push(g, options));
  job_->wait(waits, {other.get()});
  EXPECT_EQ(waits->versions(), (std::vector<std::uint64_t>{1, 1}));
  const auto expected = total({g});
  const auto w = total({pull()});
  for (std::size_t i = 0; i < w.size(); ++i) ASSERT_NEAR(w[i], -0.5 * 3 * expected[i], 1e-5);
}

TEST_F(Clients, RefusesWrongArraysAndCodecs) {
  Arrays g = random_of(table_, 1);
  EXPECT_THROW(push(g, {.codec = "int8:block=64"}), InvalidArgument);
  g[2].pop_back();
  try {
    push(g);
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "parameter 'layer.bias' has 64 elements, its array has 63");
  }
  g.pop_back();
  EXPECT_THROW(push(g), InvalidArgument);
}

TEST_F(Clients, AnErrorOfAPushNamesTheShardAndEndsNothing) {
  Arrays g = random_of(table_, 1);
  g[4].back() = std::nanf("");
  try {
    wait(push(g));
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "shard 1 refused push: it holds NaN or Inf");
  }
  wait(push(random_of(table_, 2)));
}

TEST_F(Clients, TimesOutNamingTheShardsAndGoesOn) {
  const auto feedback = std::make_shared<codec::ErrorFeedback>();
  const Arrays g = random_of(table_, 1);
  const auto late =
      client_->push(spans_of<Gradients>(g), {.codec = table_.codecs[4], .feedback = feedback},
                    soon(), Deadline::at_once());
  client_->turn();  // sends a frame, and then it is over
  try {
    late->work().rethrow();
    ADD_FAILURE();
  } catch (const Timeout& error) {
    EXPECT_STREQ(
        error.what(),
        "shard 0, shard 1: no answer to push in time; is it stopped, or the network slow?");
  }
  wait(push(random_of(table_, 2)));
  const auto stats = client_->ask(Op::kStats, 0, soon());
  wait(stats);
  EXPECT_NE(stats->texts()[0].find("\"partial\": 1"), std::string::npos) << stats->texts()[0];
}

TEST_F(Clients, KeepPulledDifferencesRightThoughAPullTimedOut) {
  const std::string codec = table_.codecs[3];
  wait(push(random_of(table_, 1)));
  Arrays out = zeros_of(table_);
  wait(client_->pull(spans_of<Values>(out), codec, soon()));
  wait(push(random_of(table_, 2)));
  const auto late = client_->pull(spans_of<Values>(out), codec, Deadline::at_once());
  client_->turn();
  EXPECT_THROW(late->work().rethrow(), Timeout);
  const Arrays before = out;
  wait(push(random_of(table_, 3)));
  EXPECT_EQ(out, before);  // nobody waits for it any more
  wait(client_->pull(spans_of<Values>(out), codec, soon()));
  const Arrays exact = pull();
  double apart = 0;
  for (std::size_t p = 0; p < out.size(); ++p)
    for (std::size_t i = 0; i < out[p].size(); ++i)
      apart = std::max(apart, std::abs(double{out[p][i]} - double{exact[p][i]}));
  EXPECT_LT(apart, 0.02);
}

TEST_F(Clients, LoseNothingOverRandomDeathsOfChannels) {
  for (std::size_t codec = 3; codec < table_.codecs.size(); ++codec) {
    start(some_table(2));
    std::vector<ShardLayout> layouts;
    for (std::uint32_t i = 0; i < 2; ++i) layouts.emplace_back(table_, codecs_of(table_), i);
    std::vector<Arrays> pushed;
    std::vector<double> applied(table_.elements());
    for (std::size_t s = 0; s < 2; ++s)
      job_->servers[s]->log_frames([&, s](const AppliedFrame& frame) {
        const std::size_t first =
            (s == 0 ? 0 : layouts[0].elements()) + layouts[s].frames()[frame.frame].first;
        for (std::size_t i = 0; i < frame.gradient.size(); ++i)
          applied[first + i] += double{frame.gradient[i]};
      });
    const auto feedback = std::make_shared<codec::ErrorFeedback>();
    std::mt19937 random(static_cast<unsigned>(codec));
    for (unsigned i = 0; i < 12; ++i) {
      pushed.push_back(random_of(table_, i));
      const auto call = push(pushed.back(), {.codec = table_.codecs[codec], .feedback = feedback});
      if (random() % 2 == 0) {
        wait(call);
        continue;
      }
      for (unsigned turns = random() % 4; turns > 0; --turns) client_->turn();
      // What is on its way still arrives; then the client is gone.
      client_->close(Deadline::at_once());
      for (int turns = 0; turns < 40; ++turns)
        for (auto& each : job_->servers) each->turn();
      client_ = job_->connect(table_, 0, i + 1);
      wait(client_->join(soon()));
    }
    Arrays left;
    for (const Parameter& each : table_.parameters) left.push_back(feedback->residual(each.name));
    const auto all = total({left}), expected = total(pushed);
    for (std::size_t i = 0; i < all.size(); ++i)
      ASSERT_NEAR(all[i] + applied[i], expected[i], 1e-4) << table_.codecs[codec] << ", " << i;
  }
}

TEST_F(Clients, CloseEndsOpenCalls) {
  const auto call = client_->ask(Op::kWait, 100, soon());
  client_->turn();
  client_->close(soon());
  EXPECT_THROW(call->work().rethrow(), Aborted);
  EXPECT_THROW(client_->join(soon()), Aborted);
}

}  // namespace serve_client_test
}  // namespace gradwire::serve
