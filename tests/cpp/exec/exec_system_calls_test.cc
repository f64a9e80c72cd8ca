// A repeated call over shared memory makes no system call but those by which ranks sleep and wake
// each other. The kernel itself watches: any other ends the process (seccomp).
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <vector>

#include "exec_ranks.h"

namespace gradwire::exec {
namespace exec_system_calls_test {

// What the C library calls for poll and epoll_wait.
#ifdef __x86_64__
constexpr int kWaits[] = {SYS_poll, SYS_epoll_wait};
#else
constexpr int kWaits[] = {SYS_ppoll, SYS_epoll_pwait};
#endif
// Yield, sleep and be woken (poll, and what empties the bells), wake a rank (send, eventfd), and
// the end of the test.
constexpr int kAllowed[] = {SYS_sched_yield, kWaits[0],       kWaits[1], SYS_recvfrom,
                            SYS_sendto,      SYS_read,        SYS_write, SYS_futex,
                            SYS_exit_group,  SYS_rt_sigreturn};
constexpr int kAsExpected = 42;

// The exit code says which call it was.
void tell(int /*signal*/, siginfo_t* info, void* /*context*/) { ::_exit(info->si_syscall); }

// Forbids this thread all other system calls from now on.
void forbid_other_calls() {
  std::vector<sock_filter> program = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (int number : kAllowed) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(number), 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
  const sock_fprog filter = {static_cast<unsigned short>(program.size()), program.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    ::_exit(1);
}

// Runs `body` in a process of its own on every rank, after a call of it without the filter.
int exit_code_of(const std::function<void(Communicator&)>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    struct sigaction action = {};
    action.sa_sigaction = &tell;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSYS, &action, nullptr);
    Ranks ranks(3, "shm");
    std::atomic<int> over{0};
    ranks.run([&](Communicator& comm) {
      body(comm);
      forbid_other_calls();
      body(comm);
      ++over;
      while (over < ranks.size()) ::sched_yield();
      ::_exit(kAsExpected);
    });
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(SystemCalls, RepeatedCallsMakeNoneButWakeUps) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers make system calls of their own";
#endif
  for (std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{100000}})
    for (std::string_view codec : {"none", "onebit"}) {
      std::vector<std::vector<float>> arrays(3, std::vector<float>(n, 1));
      const int code = exit_code_of([&, made = codec::make_codec(codec)](Communicator& comm) {
        const Array array = array_of(arrays[static_cast<std::size_t>(comm.identity().rank)]);
        Request call;
        call.codec = made;
        call.inputs = call.outputs = {&array, 1};
        for (int i = 0; i < 200; ++i) comm.run(call);
        for (int i = 0; i < 200; ++i) {
          const auto work = comm.begin(call);
          comm.wait(*work, 10);
        }
      });
      EXPECT_EQ(code, kAsExpected) << codec << " n=" << n << ": the call's number, if not";
    }
}

TEST(SystemCalls, OthersAreNoticed) {  // or the test above could not fail
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers make system calls of their own";
#endif
  EXPECT_EQ(exit_code_of([](Communicator&) { ::getppid(); }), SYS_getppid);
}

}  // namespace exec_system_calls_test
}  // namespace gradwire::exec
