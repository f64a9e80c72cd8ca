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
  unsigned index = 0;
  bool done = true;
};

}  // namespace

struct Crew {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<unsigned> ready, paused;
  unsigned running = 0, alive = 0;
  std::uint64_t events = 0;
  std::function<void(unsigned)> work;
};

namespace {

// Guarded by the lock of whoever runs a kernel.
Crew* active = nullptr;
std::vector<std::unique_ptr<Crew>> crews;
std::vector<Crew*> idle;
Place scheduler;
void* scheduler_sanitizer = nullptr;
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_size = 0;

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

// makecontext() hands over ints.
void entry(unsigned high, unsigned low) {
  after_switch(nullptr, &scheduler_stack, &scheduler_stack_size);
  Fiber& self = *reinterpret_cast<Fiber*>(std::uintptr_t{high} << 32 | low);
  for (;;) {  // one job after the other
    active->work(self.index);
    self.done = true;
    --active->alive;
    ++active->events;
    to_scheduler(self);
  }
}

std::unique_ptr<Fiber> make(unsigned index) {
  auto fiber = std::make_unique<Fiber>();
  fiber->index = index;
  void* stack = ::mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stack == MAP_FAILED) fatal("no memory for a fiber");
  fiber->stack = static_cast<std::byte*>(stack);
  ucontext_t& context = fiber->place.context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStack - kLine * first_line(index);
  context.uc_link = nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(fiber.get());
  makecontext(&context, reinterpret_cast<void (*)()>(entry), 2,
              static_cast<unsigned>(address >> 32), static_cast<unsigned>(address));
  fiber->place.entered = false;
  return fiber;
}

void run(unsigned index) {
  Fiber& fiber = *active->fibers[index];
  active->running = index;
  before_switch(&scheduler_sanitizer, fiber.stack, kStack);
  go(scheduler, fiber.place);
  after_switch(scheduler_sanitizer, nullptr, nullptr);
}

}  // namespace

void fatal(const char* what) {
  std::fprintf(stderr, "simulated CUDA: %s\n", what);
  std::abort();
}

Crew& take_crew(unsigned count, std::function<void(unsigned)> body) {
  if (idle.empty()) idle.push_back(crews.emplace_back(std::make_unique<Crew>()).get());
  Crew& crew = *idle.back();
  idle.pop_back();
  while (crew.fibers.size() < count)
    crew.fibers.push_back(make(static_cast<unsigned>(crew.fibers.size())));
  crew.work = std::move(body);
  crew.alive = count;
  crew.ready.clear();
  crew.paused.clear();
  for (unsigned i = 0; i < count; ++i) {
    crew.fibers[i]->done = false;
    crew.ready.push_back(i);
  }
  return crew;
}

void give_back(Crew& crew) { idle.push_back(&crew); }

bool run_fibers(Crew& crew, const std::function<std::size_t(const std::vector<unsigned>&)>& pick) {
  active = &crew;
  crew.ready.insert(crew.ready.end(), crew.paused.begin(), crew.paused.end());
  crew.paused.clear();
  while (crew.alive > 0) {
    if (crew.ready.empty() && !crew.paused.empty()) return false;
    if (crew.ready.empty()) fatal("a barrier that some thread of the block never reaches");
    const std::size_t at = pick(crew.ready);
    const unsigned next = crew.ready[at];
    crew.ready[at] = crew.ready.back();
    crew.ready.pop_back();
    run(next);
  }
  return true;
}

std::uint64_t events(const Crew& crew) { return crew.events; }

unsigned current_fiber() { return active->running; }
void suspend() {
  ++active->events;
  to_scheduler(*active->fibers[active->running]);
}
void resume(unsigned fiber) { active->ready.push_back(fiber); }
void pause_fiber() {
  active->paused.push_back(active->running);
  to_scheduler(*active->fibers[active->running]);
}

}  // namespace simulated
