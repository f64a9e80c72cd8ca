// Ways: the pairs of interfaces by which a rank reaches one peer, and the news of them. All sockets
// to the peer share it. Any thread may use it.
//
// A way whose sockets have ended is made anew: a thread of Python connects and authenticates new
// sockets, all that the way has, and leaves them here; control and each link take their own ones.
// Generations tell the sockets of a way from those that it had before.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gradwire/base/types.h"
#include "gradwire/transport/connection.h"

namespace gradwire::transport {

// A way failed, or works again.
struct WayNews {
  int way = 0;
  bool works = false;
  std::string why;
};

inline constexpr int kMostWays = 8;  // between two ranks
inline constexpr int kControlPart = 0;

class Ways {
 public:
  // Throws InvalidArgument for more than kMostWays.
  explicit Ways(int count);

  int count() const noexcept { return static_cast<int>(left_out_by_.size()); }

  // Reports that a link leaves a way out; news is what the first link reports.
  void leave_out(int way, const void* link, const std::string& why);
  // Reports that a link uses a way again; news is what the last link reports. A link that ends does
  // so silently.
  void use_again(int way, const void* link, bool silently = false);
  // Returns the oldest news that was not returned before.
  std::optional<WayNews> next();

  // Reports that a socket of a way has ended, of this generation.
  void end(int way, std::uint32_t generation);
  // Reports that the peer is gone: no way to it will be made anew.
  void finish();
  bool finished();
  // Returns the ways of which a socket has ended, and that were not made anew since.
  std::vector<int> ended();
  std::uint32_t generation(int way);
  // Leaves the sockets of a way's next generation, with their parts, in the order in which each
  // link has them. Closes those of an older one that nobody has taken.
  void renew(int way, std::uint32_t generation, std::vector<Connection> sockets);
  // Returns a part's new sockets of a way; empty where there are none.
  std::vector<Connection> take(int way, int part);

 private:
  struct Renewal {
    std::uint32_t generation = 0;
    bool ended = false;
    std::map<int, std::vector<Connection>> parts;  // that were not taken
  };

  std::mutex mutex_;
  bool finished_ = false;
  std::vector<Renewal> renewals_;                   // by way
  std::vector<std::set<const void*>> left_out_by_;  // by way
  std::deque<WayNews> news_;
};

}  // namespace gradwire::transport
