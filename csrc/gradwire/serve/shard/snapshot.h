// A shard's state outside of the shard: to write, to restore, and the copy that is made of it while
// the shard goes on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gradwire/serve/wire/layout.h"
#include "gradwire/serve/wire/message.h"

namespace gradwire::serve {

struct Snapshot {
  struct Slot {
    std::string name;  // "w", then the rule's states; or those of Vectors
    std::vector<float> values;
  };
  std::string table;
  std::uint32_t shard = 0;
  std::uint64_t version = kNoVersion;
  std::vector<std::uint64_t> steps;  // updates of each frame
  std::vector<Slot> slots;
};

// Copies a shard block by block, so that its thread is never held up for longer than a block. What
// comes of it is the shard as it was at the beginning: a frame that is about to change is copied
// before.
class SnapshotCopy {
 public:
  // `to` has room for all values; `done` is called when they are there.
  SnapshotCopy(std::shared_ptr<Snapshot> to, std::function<void()> done);

  // Copies a frame unless it is copied already: call it before the frame changes.
  void keep(const std::vector<ShardFrame>& frames, const std::vector<Snapshot::Slot>& slots,
            std::size_t index);
  // Copies the next block. Returns whether nothing is left; done() has then been called.
  bool copy_block(const std::vector<ShardFrame>& frames, const std::vector<Snapshot::Slot>& slots);

 private:
  std::shared_ptr<Snapshot> to_;
  std::function<void()> done_;
  std::vector<bool> kept_;  // by frame
  std::size_t next_ = 0;
};

}  // namespace gradwire::serve
