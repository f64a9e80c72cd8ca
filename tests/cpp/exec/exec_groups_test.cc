// Groups of some processes, whose progress threads they share. Each works, fails and ends by
// itself, whatever the others do meanwhile.
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <iterator>

#include "exec_ranks.h"
#include "gradwire/base/error.h"

namespace gradwire::exec {
namespace exec_groups_test {

constexpr int kProcesses = 3;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kRounds = 3;
#else
constexpr int kRounds = 6;
#endif

// The number of this process's threads ("task") or descriptors ("fd").
std::ptrdiff_t count_of(const std::string& what) {
  const std::filesystem::directory_iterator all("/proc/self/" + what);
  return std::distance(begin(all), end(all));
}

// A thread that was joined may be counted for a moment.
void expect_no_more(const std::string& what, std::ptrdiff_t than) {
  for (const Deadline limit = Deadline::after(10); count_of(what) > than && !limit.passed();)
    std::this_thread::yield();
  EXPECT_LE(count_of(what), than) << what;
}

// One all_reduce, and its array.
struct Sum {
  explicit Sum(std::size_t n, float value = 1, double timeout = 30)
      : values(n, value), arrays{array_of(values)} {
    request.algorithm = "ring";
    request.inputs = request.outputs = arrays;
    request.timeout = timeout;
  }
  Sum(const Sum&) = delete;
  Sum& operator=(const Sum&) = delete;

  std::vector<float> values;
  Array arrays[1];
  Request request;
};

// Some calls at once, small and large, of which the progress thread moves what this thread does
// not.
void add(Communicator& comm, double timeout = 30) {
  std::deque<Sum> sums;
  std::vector<std::shared_ptr<Work>> works;
  for (std::size_t n : {1, 70000, 300}) {
    sums.emplace_back(n, static_cast<float>(works.size()) + 1, timeout);
    works.push_back(comm.submit(sums.back().request));
  }
  for (const auto& each : works) comm.wait(*each, 60);
  Sum last(10, 4, timeout);
  comm.run(last.request);
  const auto size = static_cast<float>(comm.identity().size);
  for (std::size_t i = 0; i < works.size(); ++i)
    EXPECT_EQ(sums[i].values,
              std::vector<float>(sums[i].values.size(), size * (static_cast<float>(i) + 1)));
  EXPECT_EQ(last.values, std::vector<float>(10, size * 4));
}

// A message to the next rank, from the one before.
void pass(Communicator& comm) {
  const int rank = comm.identity().rank, size = comm.identity().size;
  std::vector<int> own(1000, rank), got(1000);
  const auto bytes = [](std::vector<int>& all) { return reinterpret_cast<std::byte*>(all.data()); };
  const std::size_t length = own.size() * sizeof(int);
  const auto receive = comm.receive(bytes(got), length, (rank + size - 1) % size, 30);
  const auto send = comm.send(bytes(own), length, (rank + 1) % size, 30);
  comm.wait(*receive, 60);
  comm.wait(*send, 60);
  EXPECT_EQ(got, std::vector<int>(1000, (rank + size - 1) % size));
}

template <typename E>
void expect_error(const std::exception_ptr& error, Rank peer, const char* fate) {
  try {
    if (error) std::rethrow_exception(error);
    ADD_FAILURE() << fate << ": it works";
  } catch (const E& found) {
    EXPECT_EQ(found.peer(), peer) << fate << ": " << found.what();
  } catch (const std::exception& other) {
    ADD_FAILURE() << fate << ": " << other.what();
  }
}

// ---- What happens to a group -------------------------------------------------------------------

void works(Ranks& group, const Threads&) {
  group.run([](Communicator& comm) {
    for (int i = 0; i < 20; ++i) add(comm);
    for (int i = 0; i < 20; ++i) pass(comm);
  });
}

void closes(Ranks& group, const Threads&) {
  group.run([](Communicator& comm) {
    for (int i = 0; i < 5; ++i) pass(comm);
    add(comm);
    comm.close(30);
  });
}

void loses_a_rank(Ranks& group, const Threads&) {
  const auto errors = group.outcomes([&](Communicator& comm) {
    for (int i = 0; i < 3; ++i) add(comm);
    if (comm.identity().rank == 2) return group.vanish(2);
    for (;;) add(comm);
  });
  for (Rank rank : {0, 1}) expect_error<TransportError>(errors[rank], 2, "a rank vanished");
}

void is_aborted(Ranks& group, const Threads&) {
  const auto errors = group.outcomes([](Communicator& comm) {
    for (int i = 0; i < 3; ++i) add(comm);
    if (comm.identity().rank == 1) return comm.abort("enough");
    for (;;) add(comm);
  });
  for (Rank rank : {0, 2}) expect_error<Aborted>(errors[rank], 1, "it was aborted");
}

void disagrees(Ranks& group, const Threads&) {
  const auto errors = group.outcomes([](Communicator& comm) {
    add(comm);
    Sum other(comm.identity().rank == 0 ? 50 : 60);
    comm.wait(*comm.submit(other.request), 60);
  });
  for (const auto& error : errors) {
    try {
      if (error) std::rethrow_exception(error);
      ADD_FAILURE() << "calls differ, and it works";
    } catch (const InvalidArgument& found) {
      EXPECT_NE(std::string(found.what()).find("50"), std::string::npos) << found.what();
    } catch (const std::exception& other) {
      ADD_FAILURE() << "calls differ: " << other.what();
    }
  }
}

void waits_in_vain(Ranks& group, const Threads&) {
  const auto errors = group.outcomes([](Communicator& comm) {
    add(comm);
    if (comm.identity().rank == 2) return;
    Sum late(10, 1, /*timeout=*/1);
    comm.wait(*comm.submit(late.request), 60);
  });
  for (Rank rank : {0, 1}) expect_error<Timeout>(errors[rank], 2, "a rank is late");
}

void is_dropped(Ranks& group, const Threads& threads) {
  group.run([](Communicator& comm) { add(comm); });
  std::deque<Sum> sums;
  Ranks part(kProcesses, "shm", {}, {}, /*mortal=*/false, threads);
  for (Rank rank : {0, 1}) {
    sums.emplace_back(100000);
    part[rank].submit(sums.back().request);
  }
  for (Rank rank : {0, 1, 2}) part[rank].drop();
}  // and destroyed, with calls in flight

void is_split(Ranks& group, const Threads& threads) {
  for (int i = 0; i < 5; ++i) {
    Ranks pair(2, any_transport(i), {}, {}, /*mortal=*/false, threads);
    std::thread whole([&] { group.run([](Communicator& comm) { add(comm); }); });
    pair.run([i](Communicator& comm) {
      add(comm);
      pass(comm);
      if (i % 2 == 0) comm.close(30);
    });
    whole.join();
  }
}

TEST(Groups, EachWorksFailsAndEndsByItself) {
  using Fate = void (*)(Ranks&, const Threads&);
  constexpr Fate kFates[] = {works,     closes,        loses_a_rank, is_aborted,
                             disagrees, waits_in_vain, is_dropped,   is_split};
  std::thread([] {}).join();  // the first one makes a sanitizer start one of its own
  const std::ptrdiff_t tasks = count_of("task"), descriptors = count_of("fd");
  const Threads threads = threads_of(kProcesses);
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::thread> callers;
    for (int pick = round; Fate fate : kFates)
      callers.emplace_back([fate, &threads, transport = any_transport(pick++)] {
        Ranks group(kProcesses, transport, {}, {}, /*mortal=*/true, threads);
        fate(group, threads);
      });
    for (std::thread& each : callers) each.join();
  }
  expect_no_more("task", tasks);
  expect_no_more("fd", descriptors);
}

// The program of rank 1 ends, which all groups learn, each by the calls that it has under way.
TEST(Groups, TheEndOfAProcessEndsAllOfItsFamily) {
  for (int round = 0; round < kRounds; ++round) {
    const Threads threads = threads_of(kProcesses);
    std::vector<std::shared_ptr<Family>> families;
    std::vector<std::unique_ptr<Ranks>> groups;
    for (int i = 0; i < kProcesses; ++i) families.push_back(std::make_shared<Family>());
    for (int i = 0; i < 6; ++i) {
      groups.push_back(std::make_unique<Ranks>(kProcesses, any_transport(round + i), Tuning{},
                                               std::vector<std::vector<Rank>>{}, false, threads));
      for (Rank rank = 0; rank < kProcesses; ++rank) (*groups.back())[rank].join(families[rank]);
    }
    std::vector<std::thread> callers;
    for (int i = 0; i < 6; ++i)
      callers.emplace_back([&group = *groups[i], ends = i == round] {
        const auto errors = group.outcomes([ends](Communicator& comm) {
          add(comm);
          if (ends && comm.identity().rank == 1) comm.abort("the program ends", /*alone=*/false);
          for (;;) add(comm);
        });
        for (const auto& each : errors) expect_error<Aborted>(each, 1, "the program of rank 1");
      });
    for (std::thread& each : callers) each.join();
  }
}

// Rank 2 waits for rank 1, whose thread always has something to move in another group, so that it
// never sleeps. All the same it says that rank 1 waits for rank 0.
TEST(Groups, AWaitIsToldThoughAnotherGroupMoves) {
  const Threads threads = threads_of(kProcesses);
  Ranks group(kProcesses, "inproc", {}, {}, /*mortal=*/false, threads);
  Tuning tuning;
  tuning.progress = threads[1];
  Communicator busy(Identity{}, tuning);
  std::atomic<bool> over{false};
  std::thread feeder([&] {
    std::deque<Sum> sums;
    std::deque<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < 4; ++i) sums.emplace_back(1 << 22);
    for (std::size_t i = 0; !over; ++i) {
      if (works.size() == sums.size()) {
        busy.wait(*works.front(), 60);
        works.pop_front();
      }
      works.push_back(busy.submit(sums[i % sums.size()].request));
    }
    for (const auto& each : works) busy.wait(*each, 60);
  });
  const auto errors = group.outcomes([&](Communicator& comm) {
    if (comm.identity().rank == 0) return;
    Sum sum(10, 1, comm.identity().rank == 1 ? 60 : 1);
    const auto work = comm.submit(sum.request);
    comm.wait(*work, 90);
  });
  over = true;
  feeder.join();
  expect_error<Timeout>(errors[2], 0, "rank 0 is late");
}

}  // namespace exec_groups_test
}  // namespace gradwire::exec
