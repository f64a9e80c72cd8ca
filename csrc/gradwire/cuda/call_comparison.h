// CallComparison: finds out that all ranks make the same calls on their GPUs, whose streams would
// not notice.
//
// Calls are not compared one by one. Each rank chains its calls into a digest, and ranks compare in
// rounds: all_reduces of five words on a communicator of CPUs that serves nothing else, of
// O(log p) messages a rank. A round tells how many calls all ranks have made, and whether the
// calls that the last round counted are the same on all ranks. Where they are not, the calls are
// compared one by one, with their texts, which throws InvalidArgument as a call on CPUs does.
// It also tells the first calls from which on some rank asks all to stop, or to resize.
//
// A rank takes part in a round while it has made calls that not all ranks are known to have made
// alike. So a rank that makes no call keeps the others' round from ending, and is the one that
// their Timeout names.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "gradwire/base/work.h"
#include "gradwire/exec/communicator.h"

namespace gradwire::cuda {

// Not thread-safe.
class CallComparison {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr std::chrono::milliseconds kInterval{5};  // between two rounds' beginnings
  static constexpr std::uint64_t kManyCalls = 64;           // for which a round begins earlier
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  // Nobody else may make calls on `shadow`, which must outlive this.
  explicit CallComparison(exec::Communicator& shadow);
  ~CallComparison();
  CallComparison(const CallComparison&) = delete;
  CallComparison& operator=(const CallComparison&) = delete;

  // Adds this rank's next call: its text, the seconds that other ranks have to make it once it is
  // the oldest that not all have made, and whether this rank asks all to stop, or to resize.
  void add(std::string text, double timeout, bool asks_to_stop = false,
           bool asks_to_resize = false);

  // Return whether one of the ranks had asked to stop, or to resize, by this rank's last call. The
  // same on all ranks after the same calls, once all of these are counted.
  bool stops() const noexcept { return agreed_.stop <= made_; }
  bool resizes() const noexcept { return agreed_.resize <= made_; }
  bool all_counted() const noexcept { return counted_ == made_; }

  std::uint64_t made() const noexcept { return made_; }          // calls of this rank
  std::uint64_t compared() const noexcept { return compared_; }  // calls known to be alike
  bool is_over() const noexcept { return compared_ == made_; }

  // Looks at the round under way, and begins the next one if it is due: now if
  // `at_once`. Never blocks. Throws InvalidArgument for calls that differ, Timeout for a rank that
  // makes no call, and the failure of the communicator.
  void advance(bool at_once, Clock::time_point now = Clock::now());
  // Returns whether advance() would begin a round at once, whatever the time.
  bool has_many_calls() const noexcept { return made_ - compared_ >= kManyCalls; }
  // What advance() waits for; null: nothing.
  std::shared_ptr<Work> pending() const {
    return one_by_one_.empty() ? round_ : one_by_one_.back();
  }

 private:
  struct ComparedCall {
    std::string text;
    std::uint64_t digest = 0;  // of this call and all before
    double timeout = 0;
  };

  // The first call from which on a rank asks.
  struct Requests {
    std::uint64_t stop = kNever, resize = kNever;
  };

  struct Words {
    std::uint64_t made = 0, digest = 0, complement = 0;
    Requests requests;
  };

  const ComparedCall& oldest() const;
  const ComparedCall& call(std::uint64_t number) const;  // from 1; of those that are not compared
  std::uint64_t digest_up_to(std::uint64_t number) const;
  void begin_round(Clock::time_point now);
  void end_round();
  void begin_one_by_one();
  void check_one_by_one() const;
  std::shared_ptr<Work> compare(const ComparedCall& call);
  std::shared_ptr<Work> submit(const exec::Request& request);

  exec::Communicator& shadow_;
  std::deque<ComparedCall> calls_;  // those after the first compared_
  std::uint64_t made_ = 0, counted_ = 0, compared_ = 0;
  std::uint64_t compared_digest_ = 0;
  Requests own_, agreed_;                          // this rank's, and any rank's as far as is known
  std::shared_ptr<Work> round_;                    // null: none is under way
  std::vector<std::shared_ptr<Work>> one_by_one_;  // once calls differ
  Clock::time_point due_{};
  std::unique_ptr<Words> words_;      // of the round
  std::vector<exec::Array> nothing_;  // an empty block for each rank
};

}  // namespace gradwire::cuda
