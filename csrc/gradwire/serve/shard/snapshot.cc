#include "gradwire/serve/shard/snapshot.h"

#include <algorithm>
#include <utility>

namespace gradwire::serve {
namespace {

constexpr std::size_t kBlock = 8;  // frames: below 1 MB of each slot

}  // namespace

SnapshotCopy::SnapshotCopy(std::shared_ptr<Snapshot> to, std::function<void()> done)
    : to_(std::move(to)), done_(std::move(done)), kept_(to_->steps.size()) {}

void SnapshotCopy::keep(const std::vector<ShardFrame>& frames,
                        const std::vector<Snapshot::StateArray>& arrays, std::size_t index) {
  if (kept_[index]) return;
  kept_[index] = true;
  const auto first = static_cast<std::ptrdiff_t>(frames[index].first);
  for (std::size_t i = 0; i < arrays.size(); ++i)
    std::copy_n(arrays[i].values.begin() + first, frames[index].count,
                to_->arrays[i].values.begin() + first);
}

bool SnapshotCopy::copy_block(const std::vector<ShardFrame>& frames,
                              const std::vector<Snapshot::StateArray>& arrays) {
  for (std::size_t copied = 0; copied < kBlock && next_ < kept_.size(); ++next_) {
    if (kept_[next_]) continue;
    keep(frames, arrays, next_);
    ++copied;
  }
  if (next_ < kept_.size()) return false;
  done_();
  return true;
}

}  // namespace gradwire::serve
