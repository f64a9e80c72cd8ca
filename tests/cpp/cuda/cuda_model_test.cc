// What "auto" takes on GPUs of several hosts: every GPU sends between hosts, so that all network
// cards carry traffic, and each byte of a host's sum crosses between hosts as seldom as it can.
#include <gtest/gtest.h>

#include <set>

#include "cuda_ranks.h"
#include "gradwire/cuda/model.h"
#include "gradwire/schedule/generators.h"

namespace gradwire::cuda::model {
namespace {

schedule::Question question(int hosts, int per_host, double bytes, std::string_view codec) {
  schedule::Question asked;
  asked.ranks = hosts * per_host;
  asked.bytes = bytes;
  asked.most_message = 1e18;  // a chunk travels whole
  for (int h = 0; h < hosts; ++h) {
    auto& host = asked.hosts.emplace_back();
    for (int r = 0; r < per_host; ++r) host.push_back(h * per_host + r);
  }
  if (codec != "none") {
    asked.codec = gpu_model().codec(codec);
    asked.ratio = codec == "int8" ? 0.25 : 0.03;
  }
  return asked;
}

// Bytes that each rank sends to other hosts.
std::vector<double> sent_between(const schedule::Question& asked, const std::string& algorithm) {
  const auto made =
      schedule::generate({asked.collective, algorithm, asked.ranks, asked.root, asked.hosts});
  const int per_host = static_cast<int>(asked.hosts[0].size());
  std::vector<double> sent(static_cast<std::size_t>(asked.ranks), 0.0);
  for (const auto& round : made.rounds)
    for (const schedule::Edge& edge : round)
      if (edge.src / per_host != edge.dst / per_host)
        sent[static_cast<std::size_t>(edge.src)] +=
            asked.bytes / made.chunks * (edge.chunks.last - edge.chunks.first);
  return sent;
}

constexpr double kMegabyte = 1 << 20;

TEST(GpuModel, EveryGpuOfAHostSendsBetweenHosts) {
  for (const auto& [hosts, per_host] : {std::pair{2, 2}, {2, 4}, {2, 8}, {3, 2}, {4, 8}, {8, 8}})
    for (const double bytes : {kMegabyte, 25 * kMegabyte, 256 * kMegabyte, 1024 * kMegabyte})
      for (const char* codec : {"none", "int8", "onebit"}) {
        const schedule::Question asked = question(hosts, per_host, bytes, codec);
        const std::string chosen = schedule::choose(gpu_model(), asked).algorithm;
        const auto sent = sent_between(asked, chosen);
        const auto [least, most] = std::minmax_element(sent.begin(), sent.end());
        EXPECT_GT(*least, 0.5 * *most) << chosen;
        // Calls that bytes make long: one-bit ones have so few that fewer rounds may be quicker.
        if (bytes * asked.ratio < 6 * kMegabyte || asked.ratio < 0.1) continue;
        EXPECT_TRUE(chosen.starts_with("hierarchical(direct,")) << chosen << " of " << bytes;
      }
}

// Messages that note which ranks a rank sends to.
class Noting final : public Messages {
 public:
  Noting(std::unique_ptr<Messages> real, std::set<Rank>& peers)
      : real_(std::move(real)), peers_(peers) {}
  std::string_view name() const noexcept override { return real_->name(); }
  void begin() override { real_->begin(); }
  void send(const std::byte* data, std::size_t bytes, Rank peer,
            std::span<const Slotted> layout) override {
    peers_.insert(peer);
    real_->send(data, bytes, peer, layout);
  }
  void receive(std::byte* data, std::size_t bytes, Rank peer,
               std::span<const Slotted> layout) override {
    real_->receive(data, bytes, peer, layout);
  }
  void end(Stream stream) override { real_->end(stream); }
  void check() override { real_->check(); }
  void abort() noexcept override { real_->abort(); }
  bool rest() noexcept override { return real_->rest(); }
  void set_loss_word(std::uint32_t* word) override { real_->set_loss_word(word); }

 private:
  std::unique_ptr<Messages> real_;
  std::set<Rank>& peers_;
};

// Two hosts of two GPUs, over links between hosts that are slow enough for a small call.
TEST(GpuModel, CallsOnSeveralHostsAreHierarchicalByAuto) {
  constexpr int kRanks = 4;
  constexpr std::size_t kCount = 1 << 12;
  schedule::CostModel slow = gpu_model();
  slow.between.beta = 1e-7;
  Loopback loopback(simulated_api(), kRanks);
  std::vector<std::set<Rank>> peers(kRanks);
  transport::run_threads(kRanks, [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    const OwnedStream stream(simulated_api());
    GpuCommunicator communicator(
        simulated_api(), {rank, kRanks, {{0, 1}, {2, 3}}, 0},
        std::make_unique<Noting>(loopback.endpoint(rank, /*timeout=*/60), peers[at]));
    communicator.set_model(slow);
    DeviceBytes memory(4 * kCount);
    memory.put(std::vector<float>(kCount, static_cast<float>(rank)).data(), stream.get());
    const exec::Array array{memory.data(), kCount};
    exec::Request request;
    request.inputs = request.outputs = {&array, 1};
    communicator.run(request, nullptr, stream.get());
    std::vector<float> sums(kCount);
    memory.get(sums.data(), stream.get());
    EXPECT_EQ(sums, std::vector<float>(kCount, 6.0F));
  });
  // Each rank sends to the other one of its host, and to its like on the other host.
  for (Rank rank = 0; rank < kRanks; ++rank)
    EXPECT_EQ(peers[static_cast<std::size_t>(rank)], (std::set<Rank>{rank ^ 1, rank ^ 2}));
}

}  // namespace
}  // namespace gradwire::cuda::model
