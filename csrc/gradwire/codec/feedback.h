// ErrorFeedback: what a lossy codec did not deliver, kept per key and added to the next call
// (contracts 1: one float32 vector per key and rank, in units of the summed input, independent of
// schedule, segment size and number of ranks).
//
// A call is a transaction: begin() opens e' = 0 beside e; the executor books every encode's error
// into e'; commit() makes e := e', rollback() leaves e as it was. Owned by the caller, and outlives
// its transactions; guarded by its own mutex; one key may be in one open transaction only.
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
  struct Entry;

 public:
  // One call's view of its keys, in order. Rolls back when destroyed open. A repeated call
  // allocates nothing the size of an extent.
  class Transaction {
   public:
    // Throws InvalidArgument, and opens nothing, for a key that is already open, and for one whose
    // residual has another length.
    Transaction(ErrorFeedback& owner, const std::vector<KeyedExtent>& extents);
    Transaction(const Transaction&) = delete;
    Transaction& operator=(const Transaction&) = delete;
    ~Transaction();

    std::span<const float> residual(std::size_t extent) const;  // e; empty means all zero
    std::span<float> next(std::size_t extent);                  // e', starts at zero
    void commit();
    void rollback() noexcept;

   private:
    ErrorFeedback& owner_;
    std::vector<Entry*> entries_;  // none once closed
  };

  // A copy of this rank's residual; empty when the key was never used.
  std::vector<float> residual(const std::string& key) const;
  // Adds `values` to the key's residual: load, or take over a leaver's.
  void add(const std::string& key, std::span<const float> values);
  // Multiplies every residual, for a changed loss scale or learning rate.
  void scale(double factor);
  void clear();
  std::vector<KeyedExtent> keys() const;

  // add, scale and clear throw InvalidArgument for a key in an open transaction.

 private:
  struct Entry {
    std::vector<float> current;  // e; empty means all zero, of any length
    std::vector<float> next;     // e' of the open transaction; between two, memory for the next one
    bool open = false;
  };

  void open(const KeyedExtent& extent, std::vector<Entry*>& opened);

  mutable std::mutex mutex_;
  std::map<std::string, Entry> entries_;  // a map, so that transactions can point to entries
};

}  // namespace gradwire::codec
