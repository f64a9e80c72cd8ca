// PointToPoint: send and recv between two ranks, independent of the order of collectives, on links
// of their own. Messages between two ranks match in order. A recv from any rank takes the first
// message that no earlier recv waits for. A message to the rank itself is copied and kept until a
// recv takes it, so sending it never blocks.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "gradwire/base/deadline.h"
#include "gradwire/base/error.h"
#include "gradwire/base/types.h"
#include "gradwire/base/wire.h"
#include "gradwire/base/work.h"
#include "gradwire/exec/control/status.h"
#include "gradwire/exec/execution/execution.h"
#include "gradwire/exec/execution/links.h"

namespace gradwire::exec {

// One message, sent or received. Its memory must stay valid until the work is done.
struct Transfer {
  std::shared_ptr<Work> work;
  std::byte* data = nullptr;
  std::size_t size = 0;  // bytes
  // send: what they are, where they travel packed (codec/lossless.h); none: they do not.
  std::optional<DType> packed_as{};
  Rank peer = kAnyRank;  // recv: kAnyRank until matched
  double timeout = 0;    // seconds
  Deadline deadline = Deadline::never();
  std::size_t moved = 0;        // bytes so far
  std::uint32_t frames = 0;     // so far
  std::vector<std::byte> copy;  // a message to the rank itself, to which `data` points

  static constexpr Rank kAnyRank = -1;
  bool started() const noexcept { return frames > 0; }
};

class PointToPoint {
 public:
  PointToPoint(Rank rank, int size, std::uint32_t communicator);

  // Sends a message. One to the rank itself is complete at once.
  void send(Transfer transfer);
  void receive(Transfer transfer) { receives_.push_back(std::move(transfer)); }

  bool idle() const noexcept { return sends_.empty() && receives_.empty(); }
  // Moves what can be moved now, and returns whether that was anything. Finishes the works of
  // complete transfers.
  bool advance(Links& links, TrafficCounter& traffic, Observer* observer = nullptr);
  // Returns the first transfer whose deadline has passed; null if there is none.
  const Transfer* overdue() const;
  // Returns what the first transfer waits for that is not complete and that `is_awaited` accepts;
  // one with a known peer, if there is any.
  using IsAwaited = std::function<bool(const Transfer&, bool sends)>;
  std::optional<Wait> waiting(const IsAwaited& is_awaited) const;
  void fail(const std::exception_ptr& error) noexcept;

 private:
  bool advance_send(Transfer& transfer, Links& links, TrafficCounter& traffic);
  bool advance_receive(Links& links, Rank peer);
  void will_move() const noexcept {
    if (observer_ != nullptr) observer_->moves();
  }
  void has_moved(const MessageFrame& frame) const noexcept {
    if (observer_ != nullptr) observer_->moved(frame);
  }
  bool receive_own();
  std::deque<Transfer>::iterator match(Rank peer);
  std::optional<ConstBytes> arrived(const Transfer& transfer, Links& links, Rank peer);
  FrameHeader header_of(const Transfer& transfer, std::uint32_t operation) const;
  void land(Transfer& transfer, ConstBytes message);
  InvalidArgument wrong_size(const Transfer& transfer, Rank sender) const;

  Rank rank_;
  int size_;
  std::uint32_t communicator_;
  std::deque<Transfer> sends_, receives_;
  std::deque<Transfer> own_;                    // to this rank itself, before a recv takes them
  std::vector<bool> busy_;                      // peers to which an earlier message is on its way
  std::vector<std::uint32_t> sent_, received_;  // by peer: whole messages so far
  std::vector<bool> gone_;                      // ranks that can send no more, and this rank
  Observer* observer_ = nullptr;                // in advance()
};

}  // namespace gradwire::exec
