// A long link between two network namespaces, for kernels without netem: a TUN device `far0` in
// each, and between them a rate, a one-way delay, a queue that drops what it cannot hold, and
// random loss.
//   long_link NAMESPACE NAMESPACE MBIT ONE_WAY_MS LOSS QUEUE_MS
// A namespace is a path, as /proc/PID/fd/N. Runs until it is killed; prints "up" when packets pass.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kLargest = 9200;  // bytes of a packet
constexpr int kAtOnce = 64;             // packets between two looks at what is due

struct Shape {
  double bytes_per_second;
  Clock::duration delay;
  double loss;  // the probability of it
  double queue_seconds;
};

struct Packet {
  Clock::time_point due;
  std::vector<char> bytes;
};

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

// Moves this thread into the namespace, and makes the device there.
int open_device(const char* space) {
  const int entry = ::open(space, O_RDONLY | O_CLOEXEC);
  if (entry < 0 || ::setns(entry, CLONE_NEWNET) != 0) fail(space);
  ::close(entry);
  const int device = ::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (device < 0) fail("/dev/net/tun");
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strcpy(request.ifr_name, "far0");
  if (::ioctl(device, TUNSETIFF, &request) != 0) fail("TUNSETIFF");
  return device;
}

// Carries packets one way.
class Direction {
 public:
  Direction(int in, int out, const Shape& shape) : in_(in), out_(out), shape_(shape) {}

  [[noreturn]] void run() {
    while (true) {
      await();
      deliver();
      for (int i = 0; i < kAtOnce && take(); ++i) continue;
    }
  }

 private:
  void await() const {
    const auto left = on_the_way_.empty() ? Clock::duration(std::chrono::hours(1))
                                          : on_the_way_.front().due - Clock::now();
    const auto wait = std::max<std::int64_t>(0, std::chrono::nanoseconds(left).count());
    const timespec limit{wait / 1'000'000'000, wait % 1'000'000'000};
    pollfd arrival{in_, POLLIN, 0};
    ::ppoll(&arrival, 1, &limit, nullptr);
  }

  void deliver() {
    const auto now = Clock::now();
    for (; !on_the_way_.empty() && on_the_way_.front().due <= now; on_the_way_.pop_front()) {
      const auto& bytes = on_the_way_.front().bytes;
      // A device that is not up yet, or full, loses the packet, as a link does.
      [[maybe_unused]] const ssize_t written = ::write(out_, bytes.data(), bytes.size());
    }
  }

  // Takes a packet, if there is one; it may be lost, or find the queue full.
  bool take() {
    std::array<char, kLargest> room;
    const ssize_t got = ::read(in_, room.data(), room.size());
    if (got <= 0) return false;
    const auto now = Clock::now();
    const auto begins = std::max(free_at_, now);
    const double queued = std::chrono::duration<double>(begins - now).count();
    if (chance_(random_) < shape_.loss || queued > shape_.queue_seconds) return true;
    const std::chrono::duration<double> takes(static_cast<double>(got) / shape_.bytes_per_second);
    free_at_ = begins + std::chrono::duration_cast<Clock::duration>(takes);
    on_the_way_.push_back({free_at_ + shape_.delay, {room.data(), room.data() + got}});
    return true;
  }

  int in_, out_;
  Shape shape_;
  Clock::time_point free_at_{};  // when the link has sent all that it took
  std::deque<Packet> on_the_way_;
  std::minstd_rand random_{7};
  std::uniform_real_distribution<double> chance_;
};

}  // namespace

int main(int count, char** given) {
  if (count != 7) {
    std::fputs("usage: long_link NAMESPACE NAMESPACE MBIT ONE_WAY_MS LOSS QUEUE_MS\n", stderr);
    return 2;
  }
  const std::chrono::duration<double, std::milli> delay(std::atof(given[4]));
  const Shape shape{.bytes_per_second = std::atof(given[3]) * 1e6 / 8,
                    .delay = std::chrono::duration_cast<Clock::duration>(delay),
                    .loss = std::atof(given[5]),
                    .queue_seconds = std::atof(given[6]) / 1000};
  const sched_param first{.sched_priority = 1};
  ::sched_setscheduler(0, SCHED_FIFO, &first);  // where allowed: a link waits for no processor
  const int near = open_device(given[1]), far = open_device(given[2]);
  std::puts("up");
  std::fflush(stdout);
  std::jthread back([&] { Direction(far, near, shape).run(); });
  Direction(near, far, shape).run();
}
