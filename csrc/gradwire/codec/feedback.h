// ErrorFeedback: what a lossy codec did not deliver, kept per key and added to the next call
// (contracts 1: one float32 vector per key and rank, in units of the summed input, independent of
// schedule, segment size and number of ranks).
//
// A call is a transaction: begin() opens e' = 0 beside e; the executor books every encode's error
// into e'; commit() makes e := e', rollback() leaves e as it was. Owned by the caller; guarded by
// its own mutex; one key may be in one open transaction only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace gradwire::codec {

struct KeyedExtent {
  std::string key;
  std::size_t count = 0;  // elements
};

class ErrorFeedback {
 public:
  // One call's view of its keys, in order. Rolls back when destroyed open.
  class Transaction {
   public:
    Transaction(ErrorFeedback& owner, std::vector<KeyedExtent> extents);
    Transaction(const Transaction&) = delete;
    Transaction& operator=(const Transaction&) = delete;
    ~Transaction();

    std::span<const float> residual(std::size_t extent) const;  // e; empty means all zero
    std::span<float> next(std::size_t extent);                  // e', starts at zero
    void commit();
    void rollback() noexcept;

   private:
    ErrorFeedback& owner_;
    std::vector<KeyedExtent> extents_;
    std::vector<std::vector<float>> next_;
    bool open_ = true;
  };

  // A copy of this rank's residual; empty when the key was never used.
  std::vector<float> residual(const std::string& key) const;
  // Adds `values` to the key's residual: load, or take over a leaver's.
  void add(const std::string& key, std::span<const float> values);
  // Multiplies every residual, for a changed loss scale or learning rate.
  void scale(double factor);
  void clear();
  std::vector<KeyedExtent> keys() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<float>> residuals_;
  std::map<std::string, std::size_t> open_;  // keys in a transaction, with their counts
};

}  // namespace gradwire::codec
