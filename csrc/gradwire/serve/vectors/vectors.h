// Vectors: what a shard of a table with the rule `staged` holds in place of a rule's state: the
// parameters "w" and other vectors of the same elements, by name, and the pushes that are staged
// until a command adds them up into a vector. The commands of a request are run all or none.
//
// Values are float32 words: one per element, or two for float64. A change makes a new vector, so
// that a pull may go on reading the old one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gradwire/serve/vectors/commands.h"

namespace gradwire::serve {

using Words = std::vector<float>;
using SharedWords = std::shared_ptr<const Words>;

struct VectorLimits {
  std::size_t vectors = 256;
  std::size_t pushes = 65'536;                                      // staged or arriving at a time
  std::uint64_t bytes = std::numeric_limits<std::uint64_t>::max();  // of all of them together
};

// Numbers of batches that are over. Only the kRemembered largest are kept; all below them count as
// over.
class FinishedBatches {
 public:
  static constexpr std::size_t kRemembered = 4096;

  void add(std::uint64_t batch);
  bool has(std::uint64_t batch) const;
  std::uint64_t last() const;  // 0 where none is over

 private:
  std::set<std::uint64_t> batches_;
  std::uint64_t below_ = 0;
};

class Vectors {
 public:
  using Map = std::map<std::string, SharedWords>;

  // The shard's elements, the words of each, and the elements of a block: see block_of().
  Vectors(std::size_t elements, std::size_t words, std::size_t block, VectorLimits limits = {});

  // Returns a vector; null where there is none of that name.
  SharedWords find(std::string_view name) const;
  // Throws InvalidArgument for another number of words, or too many vectors.
  void put(const std::string& name, Words values);
  const Map& all() const noexcept { return vectors_; }

  // Reserves room for a push that is still arriving, as long as this object exists. It must not
  // outlive its Vectors.
  class Arrival {
   public:
    explicit Arrival(std::size_t& arriving) : arriving_(&arriving) { ++arriving; }
    Arrival(Arrival&& other) noexcept : arriving_(std::exchange(other.arriving_, nullptr)) {}
    Arrival& operator=(Arrival&& other) noexcept {
      std::swap(arriving_, other.arriving_);
      return *this;
    }
    ~Arrival() {
      if (arriving_) --*arriving_;
    }

   private:
    std::size_t* arriving_;
  };

  // Reserves room for a push that begins to arrive; returns nullopt where stage() would not keep
  // it. Throws InvalidArgument where there is no room.
  std::optional<Arrival> arrive(const StagedPush& push);
  // Keeps a push, unless it is there already or its batch is over. Throws InvalidArgument where
  // there is no room.
  void stage(const StagedPush& push, Words values);
  std::size_t staged() const noexcept;
  // Returns the largest number of a batch that is over or has staged pushes; 0 without any.
  std::uint64_t last_batch() const;

  // Runs the commands in order. Throws InvalidArgument, and changes nothing, where one of them
  // cannot be run.
  std::vector<CommandResult> run(std::span<const Command> commands);

 private:
  class Draft;
  using Batch = std::map<PushName, SharedWords>;

  bool keeps(const StagedPush& push) const;
  void check_room(std::size_t vectors, std::size_t pushes) const;
  std::shared_ptr<Words> fresh();
  void recycle(Map& old);

  const std::size_t elements_, words_, block_;
  const VectorLimits limits_;
  Map vectors_;
  std::map<std::uint64_t, Batch> staged_;
  std::size_t arriving_ = 0;  // pushes
  FinishedBatches finished_;
  std::vector<std::shared_ptr<Words>> spare_;  // memory of replaced vectors, for reuse
};

}  // namespace gradwire::serve
