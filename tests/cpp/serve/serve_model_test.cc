// Random interleavings of clients and shards, each driven a turn at a time by one thread, so that a
// seed decides all of it. The shards' logs, replayed by plain code, must give the same bits.
#include <cmath>

#include "serve_job.h"

namespace gradwire::serve {
namespace serve_model_test {

// What one shard must hold: Adagrad, as its definition has it, frame by frame in the log's order.
struct Replay {
  explicit Replay(const ShardLayout& layout, std::vector<float> initial)
      : frames(layout.frames()), w(std::move(initial)), squares(w.size(), 1e-10F) {}

  void apply(const AppliedFrame& frame) {
    const std::size_t first = frames[frame.frame].first;
    for (std::size_t i = 0; i < frame.gradient.size(); ++i) {
      const float g = frame.gradient[i];
      squares[first + i] = std::fmaf(g, g, squares[first + i]);
      w[first + i] = w[first + i] + -frame.rate * g / std::sqrt(squares[first + i]);
    }
  }

  std::vector<ShardFrame> frames;
  std::vector<float> w, squares;
};

struct Model {
  Model(std::uint32_t shards, int clients, bool atomic, unsigned seed)
      : random(seed), job(shards, "inproc", /*threads=*/false) {
    table = some_table(shards, "adagrad:rate=0.05");
    table.atomic_push = atomic;
    table.divide = seed % 2 == 1;
    initial = random_of(table, seed);
    for (std::uint32_t i = 0; i < shards; ++i) {
      const ShardLayout layout(table, codecs_of(table), i);
      replays.emplace_back(layout, range_of(layout, initial));
      job.servers[i]->log_frames([this, i](const AppliedFrame& frame) {
        replays[i].apply(frame);
        expected_frames[{i, frame.client, frame.sequence}] =
            std::max(expected_frames[{i, frame.client, frame.sequence}], frame.frame + 1);
      });
    }
    for (int c = 0; c < clients; ++c) {
      members.push_back(job.connect(table, c));
      feedbacks.push_back(std::make_shared<codec::ErrorFeedback>());
      mirrors.push_back(zeros_of(table));
    }
  }

  std::size_t pick(std::size_t below) { return random() % below; }

  void begin() {
    for (auto& each : members) calls.push_back(each->join(soon()));
    for (auto& each : members) calls.push_back(each->set(spans_of<Gradients>(initial), soon()));
  }
  // One client calls something; its arrays stay.
  void act() {
    const std::size_t c = pick(members.size());
    const std::string& codec = table.codecs[pick(table.codecs.size())];
    if (pick(3) == 0) {
      calls.push_back(members[c]->pull(spans_of<Values>(mirrors[c]), codec, soon()));
      return;
    }
    gradients.push_back(random_of(table, static_cast<unsigned>(gradients.size())));
    try {
      calls.push_back(members[c]->push(spans_of<Gradients>(gradients.back()),
                                       {.codec = codec, .feedback = feedbacks[c]},
                                       Deadline::at_once(), soon()));
    } catch (const Timeout&) {  // it would have to wait, as another codec's pushes are merged
    }
  }
  void turn() {
    const std::size_t who = pick(members.size() + job.servers.size());
    who < members.size() ? members[who]->turn() : job.servers[who - members.size()]->turn();
  }
  void drain() {
    const auto over = [&] {
      return std::ranges::all_of(calls, [](const auto& each) { return each->work().done(); });
    };
    for (const Deadline deadline = soon(); !over() && !deadline.passed();) turn();
    for (const auto& each : calls) each->work().rethrow();
  }

  std::mt19937 random;
  Job job;
  ParameterTable table;
  Arrays initial;
  std::vector<Replay> replays;
  std::map<std::tuple<std::uint32_t, ClientId, std::uint32_t>, std::size_t> expected_frames;
  std::vector<std::unique_ptr<Client>> members;
  std::vector<std::shared_ptr<codec::ErrorFeedback>> feedbacks;
  std::deque<Arrays> gradients;
  std::vector<Arrays> mirrors;
  std::vector<std::shared_ptr<ClientCall>> calls;
};

TEST(ServeModel, AnyInterleavingGivesTheBitsOfItsLog) {
  const codec::FloatEnvironment environment;
  for (unsigned seed = 0; seed < 16; ++seed) {
    const std::uint32_t shards = 1 + seed % 3;
    Model model(shards, 1 + static_cast<int>(seed % 4), seed % 5 == 0, seed);
    model.begin();
    for (int i = 0; i < 12; ++i) {
      for (std::size_t turns = model.pick(30); turns > 0; --turns) model.turn();
      model.act();
    }
    model.drain();
    for (std::uint32_t s = 0; s < shards; ++s) {
      const Snapshot snapshot = model.job.servers[s]->snapshot(soon());
      EXPECT_TRUE(same_bits(snapshot.arrays[0].values, model.replays[s].w)) << "seed " << seed;
      EXPECT_TRUE(same_bits(snapshot.arrays[1].values, model.replays[s].squares))
          << "seed " << seed;
    }
    // Each push was applied once and whole on each shard.
    for (const auto& [key, frames] : model.expected_frames)
      EXPECT_EQ(frames, model.replays[std::get<0>(key)].frames.size()) << "seed " << seed;
  }
}

}  // namespace serve_model_test
}  // namespace gradwire::serve
