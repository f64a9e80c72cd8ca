// Ways: the pairs of interfaces by which a rank reaches one peer, and the news of them. All sockets
// to the peer share it. Any thread may use it.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gradwire/base/types.h"

namespace gradwire::transport {

// A way failed, or works again.
struct WayNews {
  int way = 0;
  bool works = false;
  std::string why;
};

class Ways {
 public:
  explicit Ways(int count) : left_out_by_(at(count)) {}

  int count() const noexcept { return static_cast<int>(left_out_by_.size()); }

  // Reports that a link leaves a way out; news is what the first link reports.
  void leave_out(int way, const void* link, const std::string& why);
  // Reports that a link uses a way again; news is what the last link reports. A link that ends does
  // so silently.
  void use_again(int way, const void* link, bool silently = false);
  // Returns the oldest news that was not returned before.
  std::optional<WayNews> next();

 private:
  std::mutex mutex_;
  std::vector<std::set<const void*>> left_out_by_;  // by way
  std::deque<WayNews> news_;
};

}  // namespace gradwire::transport
