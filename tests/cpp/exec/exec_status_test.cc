#include "gradwire/exec/control/status.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "gradwire/base/deadline.h"
#include "gradwire/exec/control/status_scan.h"

namespace gradwire::exec {
namespace exec_status_test {

Identity identity(Rank rank = 1, std::string job = "train") {
  Identity made;
  made.rank = rank;
  made.size = 4;
  made.communicator = 9;
  made.hosts = {{0, 1, 3}, {2}};
  made.job = std::move(job);
  made.tag = 0x1234;
  made.about = "listens on eth0";
  return made;
}

Wait wait_of(std::uint32_t n) {
  Wait wait;
  wait.number = n;
  wait.peer = static_cast<Rank>(n % 4);
  wait.round = n;
  wait.segment = n;
  wait.fingerprint = n;
  wait.spec = std::string(n % 200, static_cast<char>('a' + n % 26));
  return wait;
}

TEST(Status, TellsWhoseItIsAndWhatItDoes) {
  Status status(identity());
  auto page = read_status(status.descriptor());
  ASSERT_TRUE(page);
  EXPECT_EQ(page->pid, ::getpid());
  EXPECT_EQ(page->rank, 1);
  EXPECT_EQ(page->size, 4);
  EXPECT_EQ(page->local_size, 3);
  EXPECT_EQ(page->communicator, 9U);
  EXPECT_STREQ(page->job.data(), "train");
  EXPECT_EQ(page->activity(), Activity::kOutside);
  status.begin(/*call=*/7, /*fingerprint=*/42, coarse_now());
  page = read_status(status.descriptor());
  EXPECT_EQ(page->activity(), Activity::kCall);
  EXPECT_EQ(operation_of(*page), "call 7");
  EXPECT_EQ(page->peer(), kNoPeer);
  Wait wait = wait_of(42);
  wait.number = 7;
  wait.spec = "all_reduce(float32[10])";
  status.set_waiting(wait, coarse_now());
  page = read_status(status.descriptor());
  EXPECT_EQ(operation_of(*page), "all_reduce(float32[10]), call 7, round 42, segment 42");
  EXPECT_EQ(page->peer(), 2);
  status.end();
  EXPECT_EQ(read_status(status.descriptor())->activity(), Activity::kOutside);
  status.begin(/*call=*/8, /*fingerprint=*/42,
               coarse_now());  // the same call again: its text is known
  EXPECT_EQ(operation_of(*read_status(status.descriptor())), "all_reduce(float32[10]), call 8");
  status.begin(/*call=*/9, /*fingerprint=*/43, coarse_now());
  EXPECT_EQ(operation_of(*read_status(status.descriptor())), "call 9");
}

// What belongs together is read together, however often it changes.
TEST(Status, IsReadAllOfOneMoment) {
  Status status(identity());
  std::atomic<bool> stop{false};
  status.set_waiting(wait_of(1), 1);
  std::thread writer([&] {
    for (std::uint32_t n = 1; !stop; ++n) {
      const Wait wait = wait_of(n);  // takes longer than the update, as between two calls
      status.set_waiting(wait, n);
      std::this_thread::yield();
    }
  });
  std::uint64_t last = 0, changes = 0;
  const Deadline deadline = Deadline::after(30);
  while (changes < 200 && !deadline.passed()) {
    const auto page = read_status(status.descriptor());
    ASSERT_TRUE(page);
    const auto& now = page->current;
    const Wait expected = wait_of(static_cast<std::uint32_t>(now.since));
    ASSERT_EQ(now.round, now.since);
    ASSERT_EQ(now.segment, now.since);
    ASSERT_EQ(page->peer(), expected.peer);
    ASSERT_EQ(page->spec(), expected.spec);
    changes += now.since != last;
    last = now.since;
  }
  stop = true;
  writer.join();
  EXPECT_GE(changes, 200U);
}

struct Foreign {
  Foreign() : memory(::memfd_create("foreign", MFD_CLOEXEC)) {
    const Status status(identity());
    bytes.resize(sizeof(StatusPage));
    EXPECT_EQ(::pread(status.descriptor(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
  }
  StatusPage& page() { return *reinterpret_cast<StatusPage*>(bytes.data()); }
  std::optional<StatusPage> read() {
    EXPECT_EQ(::pwrite(memory.get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
    return read_status(memory.get());
  }
  UniqueFd memory;
  std::vector<char> bytes;
};

TEST(Status, RefusesWhatIsNoPage) {
  EXPECT_FALSE(read_status(UniqueFd(::memfd_create("empty", MFD_CLOEXEC)).get()));
  EXPECT_TRUE(Foreign().read());
  const std::vector<std::function<void(StatusPage&)>> damages = {
      [](StatusPage& page) { page.magic ^= 1; },
      [](StatusPage& page) { page.pid = 0; },
      [](StatusPage& page) { page.rank = page.size; },
      [](StatusPage& page) { page.rank = -1; },
      [](StatusPage& page) { page.size = 1 << 30; },
      [](StatusPage& page) { page.local_size = 5; },
      [](StatusPage& page) { page.current.activity = 0; },
      [](StatusPage& page) { page.current.activity = 6; },
      [](StatusPage& page) { page.current.peer = 4; },
  };
  for (std::size_t i = 0; i < damages.size(); ++i) {
    Foreign foreign;
    damages[i](foreign.page());
    EXPECT_FALSE(foreign.read()) << i;
  }
}

TEST(Status, TakesNoTextOnTrust) {
  Foreign foreign;
  foreign.page().job.fill('\x1b');
  foreign.page().current.spec.fill(~std::uint64_t{0});
  foreign.page().current.spec_of = foreign.page().current.fingerprint;
  const auto page = foreign.read();
  ASSERT_TRUE(page);
  EXPECT_EQ(std::string(page->job.data()), std::string(63, '?'));
  EXPECT_EQ(page->spec(), std::string(255, '?'));
}

TEST(Status, IsReadThoughItsWriterStoppedInTheMiddle) {
  Foreign foreign;
  foreign.page().version = 3;
  EXPECT_TRUE(foreign.read());
}

std::vector<Rank> found(const std::string& job) {
  std::vector<Rank> ranks;
  for (const RankStatus& each : ranks_on_this_host())
    if (each.pid == ::getpid() && each.page.job.data() == job) ranks.push_back(each.page.rank);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

TEST(StatusScan, FindsTheRanksThatAreOpen) {
  Status one(identity(3)), other(identity(0));
  EXPECT_EQ(found("train"), (std::vector<Rank>{0, 3}));
  other.release();
  EXPECT_EQ(found("train"), (std::vector<Rank>{3}));
}

TEST(StatusScan, AForkIsNoRank) {
  const Status status(identity());
  int ready[2], done[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(done), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    const bool told = ::write(ready[1], &byte, 1) == 1 && ::read(done[0], &byte, 1) == 1;
    ::_exit(told ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const std::vector<RankStatus> all = ranks_on_this_host();
  EXPECT_TRUE(std::none_of(all.begin(), all.end(),
                           [&](const RankStatus& each) { return each.pid == child; }));
  EXPECT_EQ(found("train"), (std::vector<Rank>{1}));
  ASSERT_EQ(::write(done[1], &byte, 1), 1);
  int status_of_child = -1;
  ::waitpid(child, &status_of_child, 0);
  EXPECT_EQ(status_of_child, 0);
  for (int fd : {ready[0], ready[1], done[0], done[1]}) ::close(fd);
}

TEST(StatusScan, SaysWhatARankDoes) {
  RankStatus seen;
  seen.pid = 4242;
  {
    Status status(identity(3));
    seen.page = *read_status(status.descriptor());
    EXPECT_NE(describe(seen).find("rank 3 (process 4242) has been outside gradwire for"),
              std::string::npos);
    EXPECT_NE(describe(seen).find("it has made no call yet"), std::string::npos);
    status.begin(5, 1, coarse_now());
    seen.page = *read_status(status.descriptor());
    EXPECT_EQ(describe(seen), "rank 3 (process 4242) is busy in call 5");
    status.end();
    Wait wait;
    wait.activity = Activity::kReceive;
    wait.number = 2;
    wait.spec = "recv of 8 bytes";
    status.set_waiting(wait, coarse_now());
    seen.page = *read_status(status.descriptor());
    EXPECT_EQ(describe(seen),
              "rank 3 (process 4242) waits for any rank in recv of 8 bytes, message 2");
    status.set_moving(/*outside=*/true);
    seen.page = *read_status(status.descriptor());
    EXPECT_NE(describe(seen).find("its last call was 5"), std::string::npos);
    status.set_failed("rank 0 vanished");
    seen.page = *read_status(status.descriptor());
    EXPECT_EQ(describe(seen), "rank 3 (process 4242) failed: rank 0 vanished");
  }
  seen.state = 'T';
  EXPECT_EQ(describe(seen), "rank 3 (process 4242) is stopped (kill -CONT 4242 lets it go on)");
}

}  // namespace exec_status_test
}  // namespace gradwire::exec
