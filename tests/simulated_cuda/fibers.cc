#include "fibers.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace simulated {
namespace {

// Stacks of a block's fibers begin in different lines of a cache: at the same place of a page each,
// they would drive each other out.
constexpr std::size_t kLine = 64, kLines = 1024;
constexpr std::size_t kStack = 128 * 1024 + kLine * kLines;
std::size_t first_line(unsigned index) { return index * 17 % kLines; }

// Where a fiber or the scheduler goes on. swapcontext() would ask the kernel each time for a mask
// of signals that nobody changes: it only enters a fiber, once.
struct Place {
  jmp_buf jump;
  ucontext_t context;
  bool entered = true;
};

void go(Place& from, Place& to) {
  if (_setjmp(from.jump) != 0) return;
  if (to.entered) _longjmp(to.jump, 1);
  to.entered = true;
  setcontext(&to.context);
}

struct Fiber {
  Place place;
  std::byte* stack = nullptr;
  void* sanitizer = nullptr;
  bool done = true;
};

// Guarded by the lock of whoever runs a kernel.
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<unsigned> ready;
Place scheduler;
void* scheduler_sanitizer = nullptr;
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_size = 0;
unsigned running = 0, alive = 0;
const std::function<void(unsigned)>* work = nullptr;

void before_switch([[maybe_unused]] void** save, [[maybe_unused]] const void* stack,
                   [[maybe_unused]] std::size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(save, stack, size);
#endif
}
void after_switch([[maybe_unused]] void* saved, [[maybe_unused]] const void** old_stack,
                  [[maybe_unused]] std::size_t* old_size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(saved, old_stack, old_size);
#endif
}

void to_scheduler(Fiber& self) {
  before_switch(&self.sanitizer, scheduler_stack, scheduler_stack_size);
  go(self.place, scheduler);
  after_switch(self.sanitizer, &scheduler_stack, &scheduler_stack_size);
}

void entry(unsigned index) {
  after_switch(nullptr, &scheduler_stack, &scheduler_stack_size);
  Fiber& self = *fibers[index];
  for (;;) {  // one job after the other
    (*work)(index);
    self.done = true;
    --alive;
    to_scheduler(self);
  }
}

void make(unsigned index) {
  auto fiber = std::make_unique<Fiber>();
  void* stack = ::mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stack == MAP_FAILED) fatal("no memory for a fiber");
  fiber->stack = static_cast<std::byte*>(stack);
  ucontext_t& context = fiber->place.context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStack - kLine * first_line(index);
  context.uc_link = nullptr;
  makecontext(&context, reinterpret_cast<void (*)()>(entry), 1, index);
  fiber->place.entered = false;
  fibers.push_back(std::move(fiber));
}

void run(unsigned index) {
  Fiber& fiber = *fibers[index];
  running = index;
  before_switch(&scheduler_sanitizer, fiber.stack, kStack);
  go(scheduler, fiber.place);
  after_switch(scheduler_sanitizer, nullptr, nullptr);
}

}  // namespace

void fatal(const char* what) {
  std::fprintf(stderr, "simulated CUDA: %s\n", what);
  std::abort();
}

void run_fibers(unsigned count, const std::function<void(unsigned)>& body,
                const std::function<std::size_t(const std::vector<unsigned>&)>& pick) {
  while (fibers.size() < count) make(static_cast<unsigned>(fibers.size()));
  work = &body;
  alive = count;
  ready.clear();
  for (unsigned i = 0; i < count; ++i) {
    fibers[i]->done = false;
    ready.push_back(i);
  }
  while (alive > 0) {
    if (ready.empty()) fatal("a barrier that some thread of the block never reaches");
    const std::size_t at = pick(ready);
    const unsigned next = ready[at];
    ready[at] = ready.back();
    ready.pop_back();
    run(next);
  }
}

unsigned current_fiber() { return running; }
unsigned fibers_alive() { return alive; }
void suspend() { to_scheduler(*fibers[running]); }
void resume(unsigned fiber) { ready.push_back(fiber); }

}  // namespace simulated
