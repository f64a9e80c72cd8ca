// p virtual ranks on one simulated GPU, each a thread with a stream of its own; and the same calls
// on CPUs, whose bits they must give.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "exec_ranks.h"
#include "gradwire/cuda/gpu_communicator.h"
#include "gradwire/cuda/messages/messages_loopback.h"
#include "simulated_cuda.h"

namespace gradwire::cuda {

inline const Api& simulated_api() { return load_api(GRADWIRE_SIMULATED_CUDA_SO); }

// Bytes in device memory, and how they come and go.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) : room_(simulated_api()), bytes_(bytes) {
    room_.take(bytes == 0 ? 1 : bytes);
  }
  std::byte* data() const { return room_.data(); }
  void put(const void* from, Stream stream) {
    simulated_api().copy(room_.data(), from, bytes_, CopyKind::kToDevice, stream);
    simulated_api().synchronize(stream);  // it reads `from` no sooner
  }
  void get(void* to, Stream stream) const {
    simulated_api().copy(to, room_.data(), bytes_, CopyKind::kToHost, stream);
    simulated_api().synchronize(stream);
  }

 private:
  Room room_;
  std::size_t bytes_;
};

class GpuRanks {
 public:
  explicit GpuRanks(int size, const std::vector<std::vector<Rank>>& hosts = {})
      : loopback_(simulated_api(), size) {
    for (Rank r = 0; r < size; ++r) add(size, hosts, loopback_.endpoint(r, /*timeout=*/20));
  }
  // Over these messages, one rank's after the other's.
  explicit GpuRanks(std::vector<std::unique_ptr<Messages>> messages)
      : loopback_(simulated_api(), static_cast<int>(messages.size())) {
    for (auto& each : messages) add(static_cast<int>(messages.size()), {}, std::move(each));
  }
  ~GpuRanks() {
    for (auto& each : streams_) simulated_api().synchronize(each->get());
  }

  int size() const { return static_cast<int>(communicators_.size()); }
  GpuCommunicator& operator[](Rank rank) { return *communicators_[at(rank)]; }
  Stream stream(Rank rank) const { return streams_[at(rank)]->get(); }

  // Runs `body` once per rank, in threads; rethrows the first error, after an abort.
  void run(const std::function<void(Rank)>& body) {
    std::vector<std::exception_ptr> thrown(communicators_.size());
    std::vector<std::thread> threads;
    for (Rank r = 0; r < size(); ++r)
      threads.emplace_back([&, r] {
        try {
          body(r);
        } catch (...) {
          thrown[at(r)] = std::current_exception();
          loopback_.abort("another rank threw");
        }
      });
    for (std::thread& each : threads) each.join();
    for (const auto& each : thrown)
      if (each) std::rethrow_exception(each);
  }

 private:
  static std::size_t at(Rank rank) { return static_cast<std::size_t>(rank); }
  void add(int size, const std::vector<std::vector<Rank>>& hosts,
           std::unique_ptr<Messages> messages) {
    const Rank rank = this->size();
    streams_.push_back(std::make_unique<OwnedStream>(simulated_api()));
    communicators_.push_back(std::make_unique<GpuCommunicator>(
        simulated_api(), GpuIdentity{rank, size, hosts, 0}, std::move(messages)));
  }
  Loopback loopback_;
  std::vector<std::unique_ptr<OwnedStream>> streams_;
  std::vector<std::unique_ptr<GpuCommunicator>> communicators_;
};

// One rank's arrays, by value.
using Arrays = std::vector<std::vector<std::byte>>;

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  return {data, data + values.size() * sizeof(T)};
}

// A call, or several that follow each other with the same residuals.
struct Case {
  exec::Request request;                // without arrays
  std::string codec;                    // empty: none
  std::vector<codec::KeyedArray> keys;  // not empty: error feedback
  std::vector<exec::Shape> shapes;
  std::vector<std::vector<std::vector<std::byte>>> inputs;  // by rank
  std::vector<std::vector<std::size_t>> outputs;            // bytes, by rank
  bool in_place = false;
  int calls = 1;
  std::vector<std::vector<Rank>> hosts = {};
};

struct Outcome {
  std::vector<Arrays> results;                    // of the last call, by rank
  std::vector<codec::ErrorFeedback::State> kept;  // by rank
};

inline exec::Request request_for(const Case& of, std::span<const exec::Array> in,
                                 std::span<const exec::Array> out) {
  exec::Request request = of.request;
  request.inputs = in;
  request.outputs = out;
  request.keys = of.keys;
  request.shapes = of.shapes;
  request.timeout = 60;
  return request;
}

inline std::uint64_t elements(const Case& of, std::size_t bytes) {
  return bytes / size_of(of.request.dtype);
}

inline Outcome on_cpus(const Case& of) {
  const int p = static_cast<int>(of.inputs.size());
  exec::Ranks ranks(p, "inproc", {}, of.hosts);
  Outcome outcome;
  outcome.results.resize(of.inputs.size());
  outcome.kept.resize(of.inputs.size());
  const auto codec = of.codec.empty() ? nullptr : codec::make_codec(of.codec);
  ranks.run([&](exec::Communicator& comm) {
    const auto me = static_cast<std::size_t>(comm.identity().rank);
    const auto feedback = of.keys.empty() ? nullptr : std::make_shared<codec::ErrorFeedback>();
    for (int call = 0; call < of.calls; ++call) {
      Arrays in = of.inputs[me], out;
      for (std::size_t bytes : of.outputs[me]) out.emplace_back(bytes, std::byte{0xAB});
      std::vector<exec::Array> inputs, outputs;
      for (auto& each : in) inputs.push_back({each.data(), elements(of, each.size())});
      for (auto& each : out) outputs.push_back({each.data(), elements(of, each.size())});
      exec::Request request = request_for(of, inputs, of.in_place ? inputs : outputs);
      request.codec = codec;
      request.feedback = feedback;
      comm.run(request);
      outcome.results[me] = of.in_place ? in : out;
    }
    if (feedback) outcome.kept[me] = feedback->save();
  });
  return outcome;
}

inline Outcome on_gpus(const Case& of, GpuRanks& ranks) {
  Outcome outcome;
  outcome.results.resize(of.inputs.size());
  outcome.kept.resize(of.inputs.size());
  const auto codec = of.codec.empty() ? nullptr : codec::make_codec(of.codec);
  ranks.run([&](Rank rank) {
    const auto me = static_cast<std::size_t>(rank);
    const Stream stream = ranks.stream(rank);
    const auto host = std::make_shared<codec::ErrorFeedback>();
    std::optional<GpuFeedback> feedback;
    if (!of.keys.empty()) feedback.emplace(simulated_api(), host);
    for (int call = 0; call < of.calls; ++call) {
      std::vector<std::unique_ptr<DeviceBytes>> in, out;
      std::vector<exec::Array> inputs, outputs;
      for (const auto& each : of.inputs[me]) {
        in.push_back(std::make_unique<DeviceBytes>(each.size()));
        in.back()->put(each.data(), stream);
        inputs.push_back({in.back()->data(), elements(of, each.size())});
      }
      for (std::size_t bytes : of.outputs[me]) {
        out.push_back(std::make_unique<DeviceBytes>(bytes));
        outputs.push_back({out.back()->data(), elements(of, bytes)});
      }
      exec::Request request = request_for(of, inputs, of.in_place ? inputs : outputs);
      request.codec = codec;
      ranks[rank].run(request, feedback ? &*feedback : nullptr, stream);
      auto& results = outcome.results[me];
      results.clear();
      for (std::size_t i = 0; i < (of.in_place ? in : out).size(); ++i) {
        results.emplace_back(of.in_place ? of.inputs[me][i].size() : of.outputs[me][i]);
        (of.in_place ? in : out)[i]->get(results.back().data(), stream);
      }
      simulated_api().synchronize(stream);  // memory goes
    }
    if (feedback) {
      feedback->bring_home();
      outcome.kept[me] = host->save();
    }
  });
  return outcome;
}

inline Outcome on_gpus(const Case& of) {
  GpuRanks ranks(static_cast<int>(of.inputs.size()), of.hosts);
  return on_gpus(of, ranks);
}

}  // namespace gradwire::cuda
