// ErrorFeedback: the quantization error of lossy codecs, kept per key and added to the next call
// (one vector per key and rank, in units of the summed input, independent of schedule, segment size
// and number of ranks). It is float32, or bfloat16 rounded at random (codec/feedback/residuals.h).
//
// A call is a transaction: e' is written beside e; settle(true) makes e := e', settle(false) leaves
// e as it was. The same holds for what a codec adapts from call to call (τ), for what it remembers
// (low-rank's Q), and for the number of calls. Between begin_step() and end_step() the transactions
// of several calls are kept or rolled back together, except those that were cancelled.
//
// Any thread may use it. It must outlive its transactions, and a key may be in one of them at a
// time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "gradwire/codec/codec.h"
#include "gradwire/codec/feedback/residuals.h"

namespace gradwire::codec {

struct KeyedArray {
  std::string key;
  std::size_t count = 0;  // elements
};

class ErrorFeedback {
  struct FeedbackKey;

 public:
  // The state of one key, to save and to load.
  struct SavedKey {
    std::vector<float> residual;  // empty means all zero, of any length
    CodecState codec_state;       // after the last call; the next one takes tau and filter
    std::uint64_t calls = 0;      // calls that were kept
    std::vector<float> memory;    // lowrank's last factor; empty: none yet
  };
  using State = std::map<std::string, SavedKey>;

  // One call's view of its keys, in order. Rolls back if it is destroyed while open. A repeated
  // call with the same object allocates nothing the size of an array.
  class Transaction {
   public:
    Transaction() = default;  // closed
    Transaction(ErrorFeedback& owner, const std::vector<KeyedArray>& arrays) {
      open(owner, arrays);
    }
    Transaction(const Transaction&) = delete;
    Transaction& operator=(const Transaction&) = delete;
    ~Transaction() { settle(false); }

    // Throws InvalidArgument, and opens nothing, if a key is already open or its residual has
    // another length.
    void open(ErrorFeedback& owner, std::span<const KeyedArray> arrays);
    bool is_open() const noexcept { return owner_ != nullptr; }

    // Returns the context of a whole key: e as the last call left it; e', whose contents are
    // unspecified and must all be written; and a call number that no other kept call has, whether
    // of this key or another.
    EncodeContext context(std::size_t array) const;
    std::vector<float> residual(std::size_t array) const;  // e; empty means all zero
    std::size_t size(std::size_t array) const;             // elements of e'
    // Return what the codec remembers of the last call, and where it writes what the next one is to
    // find: contents unspecified. If never called, the memory is kept.
    std::span<const float> memory(std::size_t array) const;
    std::vector<float>& next_memory(std::size_t array);

    // Ends the call. Does nothing when closed.
    void settle(bool keep) noexcept;
    // Ends a call that was refused before it began, in place of settle(): its keys are free at
    // once, and a step goes on as if the call had not been made.
    void cancel() noexcept;

   private:
    void close(bool of_step, bool keep) noexcept;

    ErrorFeedback* owner_ = nullptr;
    std::vector<FeedbackKey*> key_states_;
  };

  explicit ErrorFeedback(ResidualType type = ResidualType::kFloat32) noexcept : type_(type) {}
  ResidualType type() const noexcept { return type_; }

  // A step: transactions that settle between begin and end stay open until the end. end_step()
  // keeps all of them, or none if one of them was not to be kept or `keep` is false; it returns
  // which. Both throw InvalidArgument if a step is already (or not) under way, or a transaction has
  // not settled.
  void begin_step();
  bool end_step(bool keep = true);

  // Returns a copy of this rank's residual; empty when the key was never used.
  std::vector<float> residual(const std::string& key) const;
  // Sets to zero those of `values` whose residual is zero; for an unused key, all of them. Throws
  // InvalidArgument if the residual has another length.
  void mask(const std::string& key, std::span<float> values) const;
  // Adds `values` to the key's residual, to take over that of a rank that has left. In bfloat16
  // this rounds, as do scale and load.
  void add(const std::string& key, std::span<const float> values);
  void set(const std::string& key, std::span<const float> values);
  // Multiplies each element of the key's residual by its own factor.
  void multiply(const std::string& key, std::span<const float> factors);
  // Multiplies every residual, and what codecs have adapted to it, when the loss scale or the
  // learning rate changes.
  void scale(double factor);
  void clear();
  std::vector<KeyedArray> keys() const;

  // Returns the state after all finished calls, at one moment. Calls under way do not show in it.
  State save() const;
  void load(State state);  // replaces everything

  // Move the state of one key out, as if the key had never been used, and back in. Used for states
  // in device memory.
  SavedKey take(const std::string& key);
  void put(const std::string& key, SavedKey saved);

  // add, set, multiply, scale, clear, load, take and put throw InvalidArgument, and change nothing,
  // if a key is in an open transaction. All but take do so too if a residual would not be finite.

 private:
  // What changes with a call.
  struct KeyVersion {
    explicit KeyVersion(ResidualType type) noexcept : residual(type) {}

    Residual residual;
    CodecState codec_state;
    std::uint64_t calls = 0;
    std::vector<float> memory;
  };
  struct FeedbackKey {
    FeedbackKey(ResidualType type, const std::string& key);
    void put(SavedKey saved);
    std::uint64_t number() const noexcept { return name_digest ^ current.calls; }
    // Returns a number that no other change between two calls has.
    std::uint64_t draw() noexcept { return number() ^ (++changes << 48); }

    KeyVersion current;
    KeyVersion next;  // of the open transaction; otherwise memory to reuse
    std::uint64_t name_digest;
    std::uint64_t changes = 0;  // since the last call that was kept
    bool remembers = false;     // next.memory is to be kept with the call
    bool open = false;
  };

  // Replaces each element of the key's residual by `changed` of it and its value.
  template <typename Changed>
  void change(const std::string& key, std::span<const float> values, Changed changed);
  void open(const KeyedArray& array, std::vector<FeedbackKey*>& opened);
  void close(const std::vector<FeedbackKey*>& key_states, bool keep) noexcept;
  void require_closed() const;
  FeedbackKey& key_state(const std::string& key);

  const ResidualType type_;
  mutable std::mutex mutex_;
  std::map<std::string, FeedbackKey>
      key_states_;             // a map, since transactions point to its elements
  std::size_t unsettled_ = 0;  // open transactions
  bool in_step_ = false;
  bool tainted_ = false;               // a transaction of the step is not to be kept
  std::vector<FeedbackKey*> of_step_;  // settled, and waiting for the step's end
};

}  // namespace gradwire::codec
