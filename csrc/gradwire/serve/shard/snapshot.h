// Snapshot: a shard's state, to be written and restored; and how it is copied while the shard goes
// on.
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
  struct StateArray {
    std::string name;  // "w", then the rule's states; or the names of Vectors
    std::vector<float> values;
  };
  std::string table;
  std::uint32_t shard = 0;
  std::uint64_t version = kNoVersion;
  std::vector<std::uint64_t> steps;  // updates of each frame
  std::vector<StateArray> arrays;
};

// Copies a shard block by block, so that it holds up the shard's thread for one block at a time.
// The copy is the shard as it was at the beginning: a frame is copied before it changes.
class SnapshotCopy {
 public:
  // `to` has room for all values; `done` is called when they are there.
  SnapshotCopy(std::shared_ptr<Snapshot> to, std::function<void()> done);

  // Copies a frame, unless it is copied already. Must be called before the frame changes.
  void keep(const std::vector<ShardFrame>& frames, const std::vector<Snapshot::StateArray>& arrays,
            std::size_t index);
  // Copies the next block. Returns whether nothing is left; done() has then been called.
  bool copy_block(const std::vector<ShardFrame>& frames,
                  const std::vector<Snapshot::StateArray>& arrays);

 private:
  std::shared_ptr<Snapshot> to_;
  std::function<void()> done_;
  std::vector<bool> kept_;  // by frame
  std::size_t next_ = 0;
};

}  // namespace gradwire::serve
