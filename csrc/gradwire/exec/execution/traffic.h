// Statistics of a rank's operations: bytes and frames, and time in codecs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "gradwire/exec/control/observer.h"

namespace gradwire::exec {

// Adds the time for which it lives to `seconds`.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  Clock::time_point start_ = Clock::now();
};

// Bytes and frames that left this rank, headers included. A frame that is staged once for k peers
// counts k times.
struct Traffic {
  std::uint64_t bytes_sent = 0;
  std::uint64_t frames_sent = 0;
  CodecTime codec;
};

// Counts; the driver writes it, and any thread may read it.
class TrafficCounter {
 public:
  void add(std::size_t bytes, std::size_t readers) noexcept {
    bytes_.fetch_add(bytes * readers, std::memory_order_relaxed);
    frames_.fetch_add(readers, std::memory_order_relaxed);
  }
  // Adds what has been spent, and sets `spent` to zero.
  void add(CodecTime& spent) noexcept {
    encode_.store(encode_ + std::exchange(spent.encode, 0), std::memory_order_relaxed);
    decode_.store(decode_ + std::exchange(spent.decode, 0), std::memory_order_relaxed);
  }
  Traffic read() const noexcept { return {bytes_, frames_, {encode_, decode_}}; }

 private:
  std::atomic<std::uint64_t> bytes_{0}, frames_{0};
  std::atomic<double> encode_{0}, decode_{0};  // one writer
};

}  // namespace gradwire::exec
