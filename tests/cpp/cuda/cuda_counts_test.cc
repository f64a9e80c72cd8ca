// What a repeated call costs the host: calls of the CUDA runtime, kernels, and messages, counted at
// the table of functions that a communicator uses and at its messages.
#include <gtest/gtest.h>

#include <iostream>
#include <map>
#include <string>

#include "cuda_ranks.h"
#include "fake_nccl.h"
#include "gradwire/base/error.h"
#include "gradwire/cuda/gpu_fault_monitor.h"
#include "gradwire/cuda/messages/messages_nccl.h"

namespace gradwire::cuda::counts {
namespace {

// Of this thread, which is one rank.
struct Tally {
  int runtime = 0;  // calls of the CUDA runtime, without those that ask for the thread's device
  int memsets = 0;
  int copies = 0;
  int events = 0;  // recorded, or waited for
  std::uint64_t kernels = 0;
  int groups = 0;
  int messages = 0;
  int most = 0;  // messages one way, between two ranks, in one group
};
thread_local Tally tally;

constexpr double kTimeout = 250;  // seconds: a busy machine may keep a rank waiting for long

template <auto kMember, typename Result, typename... Arguments>
struct Counted {
  static inline Result (*real)(Arguments...) = nullptr;
  static inline int Tally::* kind = nullptr;
  static Result call(Arguments... arguments) {
    ++tally.runtime;
    if (kind != nullptr) ++(tally.*kind);
    return real(arguments...);
  }
};

template <auto kMember, typename Result, typename... Arguments>
void count(Api& api, Result (*Api::*)(Arguments...), int Tally::* kind = nullptr) {
  using Its = Counted<kMember, Result, Arguments...>;
  Its::real = api.*kMember;
  Its::kind = kind;
  api.*kMember = &Its::call;
}
#define COUNT(member, ...) count<&Api::member>(api, &Api::member __VA_OPT__(, ) __VA_ARGS__)

// The simulated device's functions, which count. Kernels are counted where they are launched.
const Api& counting_api() {
  static const Api made = [] {
    Api api = simulated_api();
    COUNT(allocate);
    COUNT(allocate_host);
    COUNT(set_device);
    COUNT(device_of);
    COUNT(synchronize);
    COUNT(synchronize_device);
    COUNT(capture_of);
    COUNT(create_event);
    COUNT(record, &Tally::events);
    COUNT(wait, &Tally::events);
    COUNT(query);
    COUNT(copy, &Tally::copies);
    COUNT(fill, &Tally::memsets);
    COUNT(call_host);
    return api;
  }();
  return made;
}

// Messages that count.
class CountingMessages final : public Messages {
 public:
  explicit CountingMessages(std::unique_ptr<Messages> real) : real_(std::move(real)) {}

  std::string_view name() const noexcept override { return real_->name(); }
  void begin() override {
    sent_.clear();
    received_.clear();
    real_->begin();
  }
  void send(const std::byte* data, std::size_t bytes, Rank peer,
            std::span<const Slotted> layout) override {
    count(sent_[peer]);
    real_->send(data, bytes, peer, layout);
  }
  void receive(std::byte* data, std::size_t bytes, Rank peer,
               std::span<const Slotted> layout) override {
    count(received_[peer]);
    real_->receive(data, bytes, peer, layout);
  }
  void end(Stream stream) override {
    ++tally.groups;
    real_->end(stream);
  }
  bool has_collectives() const noexcept override { return real_->has_collectives(); }
  void run_native(std::span<const NativeCollective> collectives, Stream stream) override {
    ++tally.groups;
    const std::uint64_t before = simulated_cuda_launches();
    real_->run_native(collectives, stream);
    tally.kernels -= simulated_cuda_launches() - before;  // the library's own
  }
  void check() override { real_->check(); }
  void abort() noexcept override { real_->abort(); }
  bool rest() noexcept override { return real_->rest(); }
  void set_loss_word(std::uint32_t* word) override { real_->set_loss_word(word); }

 private:
  static void count(int& messages) {
    ++tally.messages;
    tally.most = std::max(tally.most, ++messages);
  }
  std::unique_ptr<Messages> real_;
  std::map<Rank, int> sent_, received_;
};

// Ranks on one simulated GPU, joined by a fake NCCL, and monitored as users' calls are.
class CountedRanks {
 public:
  explicit CountedRanks(int size) : shadow_(size, "inproc", {}, {}, /*mortal=*/true), users_(size) {
    fake_nccl().reset();
    fake_nccl().copy_by(&simulated_api());
    ::setenv("GRADWIRE_NCCL_SO", GRADWIRE_FAKE_NCCL, 1);
    const nccl::UniqueId id = make_unique_id(Nccl::load());
    gpus_.resize(static_cast<std::size_t>(size));
    run([&](Rank rank) {
      NcclSettings settings;
      settings.rank = rank;
      settings.size = size;
      settings.timeout_seconds = kTimeout;
      Gpu& gpu = of(rank);
      gpu.communicator = std::make_unique<GpuCommunicator>(
          counting_api(), GpuIdentity{rank, size, {}, 0},
          std::make_unique<CountingMessages>(make_nccl_messages(Nccl::load(), id, settings)));
      gpu.stream = std::make_unique<OwnedStream>(simulated_api());
      gpu.host = std::make_shared<codec::ErrorFeedback>();
      gpu.feedback = std::make_unique<GpuFeedback>(counting_api(), gpu.host);
      gpu.monitor =
          std::make_unique<GpuFaultMonitor>(*gpu.communicator, shadow_[rank], users_[rank]);
    });
  }
  ~CountedRanks() {
    run([this](Rank rank) {
      rest(rank);
      of(rank).monitor.reset();
      of(rank).communicator.reset();
      of(rank).feedback.reset();
    });
    fake_nccl().copy_by(nullptr);
  }

  // Makes a call that is refused on rank 0, of these keys, and returns what it has enqueued.
  Tally refused(exec::Request request, std::size_t length,
                const std::vector<codec::KeyedArray>& keys) {
    Gpu& gpu = of(0);
    const DeviceBytes memory(length * sizeof(float));
    const exec::Array array{memory.data(), length};
    request.inputs = request.outputs = {&array, 1};
    request.keys = keys;
    gpu.host->set("kept", std::vector<float>(10, 1.0F));
    tally = {};
    tally.kernels = -simulated_cuda_launches();
    EXPECT_THROW(
        gpu.monitor->run(request, keys.empty() ? nullptr : gpu.feedback.get(), gpu.stream->get()),
        Error);
    tally.kernels += simulated_cuda_launches();
    return tally;
  }

  // What a repeated call costs each rank, of arrays of these lengths: one after calls that were
  // under way together, and have left their events to others.
  std::vector<Tally> repeated(exec::Request request, const std::vector<std::size_t>& lengths,
                              bool feeds_back) {
    std::vector<Tally> found(gpus_.size());
    run([&](Rank rank) {
      std::vector<std::unique_ptr<DeviceBytes>> memory;
      std::vector<exec::Array> arrays;
      std::vector<codec::KeyedArray> keys;
      exec::Request own = request;
      for (std::size_t n : lengths) {
        memory.push_back(std::make_unique<DeviceBytes>(n * sizeof(float)));
        memory.back()->put(std::vector<float>(n, 1.0F).data(), of(rank).stream->get());
        arrays.push_back({memory.back()->data(), n});
        if (feeds_back) keys.push_back({"key " + std::to_string(keys.size()), n});
      }
      own.keys = keys;
      own.inputs = own.outputs = arrays;
      own.timeout = kTimeout;
      constexpr int kCalls = 3;
      for (int call = 1; call <= kCalls; ++call) {
        if (call == kCalls) rest(rank);
        tally = {};
        tally.kernels = -simulated_cuda_launches();
        of(rank).monitor->run(own, feeds_back ? of(rank).feedback.get() : nullptr,
                              of(rank).stream->get());
        tally.kernels += simulated_cuda_launches();
      }
      found[static_cast<std::size_t>(rank)] = tally;
      rest(rank);
    });
    return found;
  }

 private:
  struct Gpu {
    std::unique_ptr<OwnedStream> stream;
    std::shared_ptr<codec::ErrorFeedback> host;
    std::unique_ptr<GpuFeedback> feedback;
    std::unique_ptr<GpuCommunicator> communicator;
    std::unique_ptr<GpuFaultMonitor> monitor;
  };
  void rest(Rank rank) {
    simulated_api().synchronize(of(rank).stream->get());
    of(rank).monitor->finish(kTimeout);
  }
  Gpu& of(Rank rank) { return gpus_[static_cast<std::size_t>(rank)]; }
  void run(const std::function<void(Rank)>& body) {
    transport::run_threads(static_cast<int>(gpus_.size()), [&](int rank) { body(rank); });
  }

  exec::Ranks shadow_, users_;
  std::vector<Gpu> gpus_;
};

void print(const std::string& call, int p, const Tally& of) {
  std::cout << call << ", p=" << p << ": " << of.runtime << " calls of the runtime (" << of.memsets
            << " memsets, " << of.copies << " copies), " << of.kernels << " kernels, " << of.groups
            << " groups, " << of.messages << " messages\n";
}

Tally of_worst_rank(const std::vector<Tally>& all) {
  Tally worst = all[0];
  for (const Tally& each : all) {
    worst.runtime = std::max(worst.runtime, each.runtime);
    worst.memsets = std::max(worst.memsets, each.memsets);
    worst.copies = std::max(worst.copies, each.copies);
    worst.kernels = std::max(worst.kernels, each.kernels);
    worst.groups = std::max(worst.groups, each.groups);
    worst.messages = std::max(worst.messages, each.messages);
    worst.most = std::max(worst.most, each.most);
  }
  return worst;
}

exec::Request average(std::string_view algorithm, std::string_view codec = "none") {
  exec::Request request;
  request.op = ReduceOp::kAvg;
  request.algorithm = algorithm;
  if (codec != "none") request.codec = codec::make_codec(codec);
  return request;
}

// Of a network's layers, weights and biases, odd lengths among them.
std::vector<std::size_t> parameters(int layers = 12) {
  std::vector<std::size_t> lengths;
  for (int layer = 0; layer < layers; ++layer) {
    lengths.push_back(1100 + 160 * static_cast<std::size_t>(layer));
    lengths.push_back(layer % 3 == 0 ? 65 : 64);
  }
  return lengths;
}

class CudaCounts : public testing::TestWithParam<int> {};

TEST_P(CudaCounts, APlainCallMakesFewCallsOfTheRuntime) {
  const int p = GetParam();
  CountedRanks ranks(p);
  for (std::string_view algorithm : {"auto", "ring", "direct"})
    for (std::size_t n : {std::size_t{1}, std::size_t{1} << 18}) {
      const Tally found = of_worst_rank(ranks.repeated(average(algorithm), {n}, false));
      print(std::to_string(4 * n) + " B by " + std::string(algorithm), p, found);
      EXPECT_LE(found.runtime, 4);
      EXPECT_EQ(found.memsets, 0);
      EXPECT_EQ(found.copies, 0);
      EXPECT_LE(found.most, 1);
      // One fold for each addend, or for all of a round, and it averages too.
      EXPECT_LE(found.kernels, algorithm == "direct" ? 1U : static_cast<unsigned>(p - 1));
    }
}

TEST_P(CudaCounts, ABucketOfParametersTakesFewKernels) {
  const int p = GetParam();
  CountedRanks ranks(p);
  for (std::string_view codec : {"onebit", "int8", "fp16"})
    for (std::string_view algorithm : {"auto", "ring", "direct"}) {
      const Tally found =
          of_worst_rank(ranks.repeated(average(algorithm, codec), parameters(), true));
      print("24 arrays, " + std::string(codec) + " by " + std::string(algorithm), p, found);
      EXPECT_LE(found.kernels, 10U);
      EXPECT_LE(found.most, 1);
      if (algorithm == "auto") {
        EXPECT_LE(found.groups, 2) << "not direct, nor gathered";
      }
    }
}

TEST_P(CudaCounts, ABucketIsOneMessageAPeerAndRound) {
  const int p = GetParam();
  CountedRanks ranks(p);
  for (std::string_view algorithm : {"ring", "direct", "halving_doubling", "recursive_doubling"}) {
    const Tally found = of_worst_rank(ranks.repeated(average(algorithm), parameters(), false));
    print("24 arrays by " + std::string(algorithm), p, found);
    EXPECT_EQ(found.most, 1);
    EXPECT_LE(found.runtime, 4);
    EXPECT_EQ(found.memsets, 0);
  }
}

// Of lowrank by direct with p ranks, of matrices of one shape.
Tally factored(int p, std::size_t matrices, exec::Shape shape, int rank) {
  CountedRanks ranks(p);
  exec::Request request = average("direct", "lowrank:rank=" + std::to_string(rank));
  request.op = ReduceOp::kSum;
  const std::vector<exec::Shape> shapes(matrices, shape);
  request.shapes = shapes;
  const std::vector<std::size_t> lengths(matrices, shape.rows * shape.columns);
  return of_worst_rank(ranks.repeated(request, lengths, true));
}

TEST_P(CudaCounts, TheMatricesOfABucketShareTheirKernels) {
  const int p = GetParam();
  for (const std::size_t matrices : {2U, 8U}) {
    const Tally found = factored(p, matrices, {16, 20}, 2);
    print(std::to_string(matrices) + " matrices, lowrank by direct", p, found);
    EXPECT_LE(found.kernels, 15U);
  }
}

// One block does not scale more than 32,768 elements: there are two passes.
TEST(CudaCountsOfLongFactors, AreOneKernelMoreThanOfShortOnes) {
  const Tally of_short = factored(2, 1, {20, 30}, 8);
  for (const std::size_t matrices : {1U, 2U}) {
    const Tally found = factored(2, matrices, {10, 4100}, 8);
    print(std::to_string(matrices) + " long matrices, lowrank by direct", 2, found);
    EXPECT_EQ(found.kernels, of_short.kernels + 1);
  }
}

TEST_P(CudaCounts, SparseCodecsAreOneMessageAPeerAndRoundToo) {
  const int p = GetParam();
  CountedRanks ranks(p);
  for (std::string_view codec : {"threshold", "topk"}) {
    const Tally found = of_worst_rank(ranks.repeated(average("ring", codec), {1100, 65, 64}, true));
    print("3 arrays, " + std::string(codec) + " by ring", p, found);
    EXPECT_EQ(found.most, 1);
  }
}

// Encode, owner's stage, decode; beside them open, settle and flags.
TEST_P(CudaCounts, ACodecTakesTwoOperationsAndThreeKernels) {
  const int p = GetParam();
  CountedRanks ranks(p);
  for (std::string_view codec : {"onebit", "int8", "fp16"})
    for (const bool feeds_back : {false, true}) {
      const Tally found =
          of_worst_rank(ranks.repeated(average("direct", codec), {1 << 16}, feeds_back));
      print("256 KiB, " + std::string(codec) + " by direct", p, found);
      EXPECT_EQ(found.groups, 2) << "an all-to-all and an all-gather";
      EXPECT_EQ(found.messages, 0);
      EXPECT_EQ(found.kernels, feeds_back ? 7U : 4U);
    }
}

exec::Request rooted(Collective collective, Rank root, std::string_view algorithm,
                     std::string_view codec = "none") {
  exec::Request request = average(algorithm, codec);
  request.collective = collective;
  request.root = root;
  return request;
}

// Nor does it end the communicator: a good call follows.
TEST(CudaCountsOfRefusedCalls, AreThoseOfNothing) {
  CountedRanks ranks(2);
  exec::Request of_integers = average("direct", "int8"), extremes = average("auto");
  of_integers.dtype = DType::kInt32;
  extremes.op = ReduceOp::kMax;
  const struct {
    exec::Request request;
    std::vector<codec::KeyedArray> keys = {};
  } cases[] = {
      {rooted(Collective::kReduce, 7, "nccl")},
      {rooted(Collective::kBroadcast, -1, "auto")},
      {rooted(Collective::kReduce, 2, "gather", "int8")},
      {rooted(Collective::kGather, 7, "auto")},
      {average("nonsense")},
      {average("gather(nonsense)", "onebit"), {{"a", 8}}},
      {average("nonsense", "lowrank"), {{"a", 8}}},
      {average("nonsense", "threshold"), {{"a", 8}}},
      {of_integers},
      {extremes, {{"a", 8}}},
      {average("auto"), {{"a", 9}}},
      {average("direct", "fp16"), {{"a", 4}}},
      {average("direct", "fp16"), {{"a", 4}, {"a", 4}}},
      {average("direct", "fp16"), {{"kept", 8}}},
  };
  for (const auto& each : cases) {
    const Tally found = ranks.refused(each.request, 8, each.keys);
    const auto what = std::string(name_of(each.request.collective)) + " by " +
                      std::string(each.request.algorithm);
    EXPECT_EQ(found.kernels, 0U) << what;
    EXPECT_EQ(found.memsets + found.copies + found.events + found.groups, 0) << what;
  }
  EXPECT_NO_THROW(ranks.repeated(average("auto"), {8}, false));
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaCounts, testing::Values(2, 4));

}  // namespace
}  // namespace gradwire::cuda::counts
