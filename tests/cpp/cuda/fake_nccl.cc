// See fake_nccl.h. One mutex for all. FAKE_NCCL_VERSION and FAKE_NCCL_LACKS_ABORT make the ones
// that are refused.
#define GRADWIRE_FAKE_NCCL ""
#include "fake_nccl.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gradwire/base/types.h"
#include "gradwire/cuda/nccl/nccl_abi.h"

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22809
#endif

namespace nccl = gradwire::cuda::nccl;
using gradwire::Collective;
using gradwire::DType;
using gradwire::ReduceOp;
using gradwire::cuda::Api;
using gradwire::cuda::CopyKind;
using gradwire::cuda::Event;
using gradwire::cuda::FakeNccl;
using gradwire::cuda::Stream;

namespace {

struct World;

}  // namespace

struct nccl::Comm {
  std::shared_ptr<World> world;
  int rank = 0;
  bool blocks = false;
  int questions = 0;   // that are still answered by kInProgress
  bool hangs = false;  // until it is aborted
  bool ended = false;  // destroyed or aborted: nothing may be done with it
  bool aborted = false;
  bool finalized = false;
  int lingering = 0;          // calls that are in it, and come out by themselves
  std::size_t unmatched = 0;  // messages of its group
  nccl::Result error = nccl::kSuccess;
  std::vector<Event> events;
};

namespace {

struct Message {
  nccl::Comm* comm = nullptr;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t bytes = 0;
  int peer = 0;
  Stream stream = nullptr;
};

// One of NCCL's own collectives, which needs copy_by().
struct CollectiveCall {
  gradwire::Collective kind{};
  nccl::Comm* comm = nullptr;
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;
  nccl::DataType type{};
  nccl::RedOp op{};
  int root = 0;
  Stream stream = nullptr;

  auto what() const { return std::tuple(kind, count, type, op, root); }
};

// The ranks of one id.
struct World {
  int size = 0;
  std::set<int> arrived;
  std::map<std::pair<int, int>, std::deque<Message>> sends, receives;  // by source and destination
  std::map<int, std::deque<CollectiveCall>> collectives;               // by rank
  std::vector<void*> rooms;  // which enqueued work may use for as long as the program runs
};

struct Failure {
  int result = 0;
  int after = 0;
};

struct State {
  std::map<std::string, std::shared_ptr<World>> worlds;
  std::vector<std::unique_ptr<nccl::Comm>> comms;
  std::map<std::string, Failure> failures;
  std::set<std::string> hanging, blocking;
  std::map<std::string, int> lingering;  // milliseconds
  std::map<std::string, int> calls;
  std::set<std::thread::id> group_threads;
  const Api* api = nullptr;
  bool hastens = false;
  int questions = 0, open_groups = 0, ids = 0, generation = 0;
  std::size_t last_count = 0;
};

struct Group {
  int depth = 0;
  std::vector<Message> messages;
  std::vector<CollectiveCall> collectives;
  nccl::Result error = nccl::kSuccess;

  nccl::Comm* comm() const {
    if (!messages.empty()) return messages.front().comm;
    return collectives.empty() ? nullptr : collectives.front().comm;
  }
};

// Never destroyed: a thread that was left alone may come back when the program ends.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
State& state = *new State;
thread_local Group group;

using Lock = std::unique_lock<std::mutex>;
constexpr std::chrono::seconds kLongest{30};  // no test waits for a hang for ever

// Counts the call; waits where it has to block; the result that it has to fail with, or success.
nccl::Result called(Lock& lock, const std::string& call, nccl::Comm* comm = nullptr) {
  ++state.calls[call];
  const int generation = state.generation;
  if (state.lingering.contains(call)) {
    if (comm != nullptr) ++comm->lingering;
    const std::chrono::milliseconds time{state.lingering[call]};
    changed.wait_for(lock, time, [] { return false; });
    if (comm != nullptr) --comm->lingering;
  }
  if (state.blocking.contains(call))
    changed.wait_for(lock, kLongest, [&] {
      return state.generation != generation ||
             (call != "ncclCommAbort" && comm != nullptr && comm->aborted);
    });
  const auto found = state.failures.find(call);
  if (found == state.failures.end() || found->second.after-- > 0) return nccl::kSuccess;
  found->second.after = 0;
  return static_cast<nccl::Result>(found->second.result);
}

nccl::Result misuse() {
  ++state.calls["misuse"];
  return nccl::kInvalidUsage;
}

bool in_progress(const nccl::Comm& comm) {
  return comm.hangs || comm.questions > 0 || comm.unmatched > 0 ||
         static_cast<int>(comm.world->arrived.size()) < comm.world->size;
}

// NCCL refuses a communicator whose last call is still in progress, and one that has ended.
bool usable(const nccl::Comm* comm) {
  for (const auto& known : state.comms)
    if (known.get() == comm) return !comm->ended && !in_progress(*comm);
  return false;
}

nccl::Result begin(Lock& lock, nccl::Comm& comm, const char* call) {
  comm.questions = comm.blocks ? 0 : state.questions;
  comm.hangs = state.hanging.contains(call);
  if (!comm.blocks) return state.hastens ? nccl::kSuccess : nccl::kInProgress;
  const int generation = state.generation;
  changed.notify_all();  // the peers' calls, which this one may end
  changed.wait_for(lock, kLongest, [&] {
    return state.generation != generation || comm.ended || !in_progress(comm);
  });
  return in_progress(comm) || comm.ended ? nccl::kInternalError : nccl::kSuccess;
}

void order(nccl::Comm& comm, Stream before, Stream after) {
  Event event = nullptr;
  state.api->create_event(&event);
  state.api->record(event, before);
  state.api->wait(after, event);
  comm.events.push_back(event);
}

void deliver(const Message& sent, const Message& received) {
  const std::size_t bytes = std::min(sent.bytes, received.bytes);
  if (bytes != std::max(sent.bytes, received.bytes)) misuse();
  if (state.api == nullptr) {
    std::memcpy(received.to, sent.from, bytes);
  } else {
    order(*sent.comm, sent.stream, received.stream);
    state.api->copy(received.to, sent.from, bytes, CopyKind::kOnDevice, received.stream);
    order(*sent.comm, received.stream, sent.stream);
  }
  --sent.comm->unmatched;
  --received.comm->unmatched;
}

void match(World& world) {
  for (auto& [pair, sends] : world.sends) {
    auto& receives = world.receives[pair];
    for (; !sends.empty() && !receives.empty(); sends.pop_front(), receives.pop_front())
      deliver(sends.front(), receives.front());
  }
}

void post(const Message& message) {
  World& world = *message.comm->world;
  const int self = message.comm->rank;
  ++message.comm->unmatched;
  if (message.from != nullptr)
    world.sends[{self, message.peer}].push_back(message);
  else
    world.receives[{message.peer, self}].push_back(message);
  match(world);
}

DType dtype_of(nccl::DataType type) {
  constexpr DType kAll[] = {DType::kInt8,    DType::kUInt8,   DType::kInt32,   DType::kUInt32,
                            DType::kInt64,   DType::kUInt64,  DType::kFloat16, DType::kFloat32,
                            DType::kFloat64, DType::kBFloat16};
  return kAll[type];
}

// Averages are sums here, divided at the end.
ReduceOp op_of(nccl::RedOp op) {
  constexpr ReduceOp kAll[] = {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMax, ReduceOp::kMin,
                               ReduceOp::kSum};
  return kAll[op];
}

// Computes the result of all ranks in a room, on the stream of rank 0. Returns the room.
std::byte* compute(World& world, const std::vector<CollectiveCall>& calls) {
  const CollectiveCall& first = calls.front();
  const DType dtype = dtype_of(first.type);
  const std::size_t bytes = first.count * gradwire::size_of(dtype), p = calls.size();
  const bool gathers = first.kind == Collective::kAllGather;
  const std::size_t blocks = first.kind == Collective::kReduceScatter ? p : 1;
  void* room = nullptr;
  state.api->allocate(&room, bytes * p);
  world.rooms.push_back(room);
  const auto copy = [&](std::size_t at, const void* from, std::size_t size) {
    state.api->copy(static_cast<std::byte*>(room) + at, from, size, CopyKind::kOnDevice,
                    first.stream);
  };
  if (first.kind == Collective::kBroadcast) {
    copy(0, calls[static_cast<std::size_t>(first.root)].in, bytes);
    return static_cast<std::byte*>(room);
  }
  const auto fold = [&](const void* addend, int divisor) {
    auto* const data = static_cast<std::byte*>(room);
    const gradwire::cuda::FoldSpan run{data, data, first.count * blocks, 0};
    state.api->fold_spans(static_cast<int>(dtype), static_cast<int>(op_of(first.op)), &run, 1,
                          {static_cast<const std::byte*>(addend), 0, addend == nullptr ? 0 : 1},
                          divisor, first.stream);
  };
  for (std::size_t r = 0; r < p; ++r)
    if (gathers || r == 0)
      copy(gathers ? r * bytes : 0, calls[r].in, bytes * blocks);
    else
      fold(calls[r].in, 1);
  if (!gathers && first.op == nccl::kAvg) fold(nullptr, static_cast<int>(p));
  return static_cast<std::byte*>(room);
}

// Block d of rank s becomes block s of rank d.
void exchange(const std::vector<CollectiveCall>& calls, std::size_t bytes) {
  for (std::size_t s = 0; s < calls.size(); ++s)
    for (std::size_t d = 0; d < calls.size(); ++d)
      state.api->copy(static_cast<std::byte*>(calls[d].out) + s * bytes,
                      static_cast<const std::byte*>(calls[s].in) + d * bytes, bytes,
                      CopyKind::kOnDevice, calls.front().stream);
}

void run(World& world, const std::vector<CollectiveCall>& calls) {
  const CollectiveCall& first = calls.front();
  const std::size_t bytes = first.count * gradwire::size_of(dtype_of(first.type));
  for (const CollectiveCall& each : calls) order(*first.comm, each.stream, first.stream);
  if (first.kind == Collective::kAllToAll) {
    exchange(calls, bytes);
    for (const CollectiveCall& each : calls) {
      order(*first.comm, first.stream, each.stream);
      --each.comm->unmatched;
    }
    return;
  }
  const std::byte* const result = compute(world, calls);
  for (std::size_t r = 0; r < calls.size(); ++r) {
    const bool scatters = first.kind == Collective::kReduceScatter;
    const bool gathers = first.kind == Collective::kAllGather;
    if (first.kind != Collective::kReduce || std::cmp_equal(r, first.root))
      state.api->copy(calls[r].out, result + (scatters ? r * bytes : 0),
                      bytes * (gathers ? calls.size() : 1), CopyKind::kOnDevice, first.stream);
    order(*first.comm, first.stream, calls[r].stream);
    --calls[r].comm->unmatched;
  }
}

void match_collectives(World& world) {
  for (;;) {
    std::vector<CollectiveCall> calls;
    for (int r = 0; r < world.size; ++r) {
      if (world.collectives[r].empty()) return;
      calls.push_back(world.collectives[r].front());
    }
    for (auto& [rank, waiting] : world.collectives) waiting.pop_front();
    for (const CollectiveCall& each : calls)
      if (each.what() != calls.front().what()) misuse();
    run(world, calls);
  }
}

void post(const CollectiveCall& call) {
  World& world = *call.comm->world;
  ++call.comm->unmatched;
  world.collectives[call.comm->rank].push_back(call);
  match_collectives(world);
}

nccl::Result add(const char* name, const CollectiveCall& call) {
  Lock lock(mutex);
  nccl::Result result = called(lock, name, call.comm);
  if (group.depth == 0 || state.api == nullptr || !usable(call.comm)) result = misuse();
  if (result == nccl::kSuccess)
    group.collectives.push_back(call);
  else
    group.error = result;
  return result;
}

void withdraw(const nccl::Comm* comm) {
  comm->world->collectives[comm->rank].clear();
  for (auto* side : {&comm->world->sends, &comm->world->receives})
    for (auto& [pair, messages] : *side)
      std::erase_if(messages, [&](const Message& m) { return m.comm == comm; });
}

nccl::Result add(const char* call, const Message& message, std::size_t count, int type) {
  Lock lock(mutex);
  state.last_count = count;
  nccl::Result result = called(lock, call, message.comm);
  if (group.depth == 0 || type != nccl::kUint8 || !usable(message.comm) || message.peer < 0 ||
      message.peer >= message.comm->world->size)
    result = misuse();
  if (result == nccl::kSuccess)
    group.messages.push_back(message);
  else
    group.error = result;
  return result;
}

// A communicator's end, in whatever way.
nccl::Result end(Lock& lock, nccl::Comm* comm, const char* call, bool aborts) {
  const nccl::Result result = called(lock, call, comm);
  if (comm->ended || comm->lingering > 0) return misuse();
  comm->ended = true;
  comm->aborted = aborts;
  withdraw(comm);
  for (Event event : comm->events) state.api->destroy_event(event);
  comm->events.clear();
  changed.notify_all();
  return result;
}

void reset() {
  const Lock lock(mutex);
  const int generation = state.generation;
  auto kept = std::move(state.comms);  // some thread may still be in one
  state = State{};
  state.generation = generation + 1;
  changed.notify_all();
  static auto& old = *new std::vector<std::unique_ptr<nccl::Comm>>;
  for (auto& comm : kept) old.push_back(std::move(comm));
}
void copy_by(const Api* api) {
  const Lock lock(mutex);
  state.api = api;
}
void set_in_progress(int questions) {
  const Lock lock(mutex);
  state.questions = questions;
}
void hasten() {
  const Lock lock(mutex);
  state.hastens = true;
}
void fail(const char* call, int result, int after) {
  const Lock lock(mutex);
  state.failures[call] = {result, after};
}
void linger(const char* call, int milliseconds) {
  const Lock lock(mutex);
  state.lingering[call] = milliseconds;
}
void hang(const char* call) {
  const Lock lock(mutex);
  state.hanging.insert(call);
}
void block(const char* call) {
  const Lock lock(mutex);
  state.blocking.insert(call);
}
int calls(const char* call) {
  const Lock lock(mutex);
  return state.calls[call];
}
int alive() {
  const Lock lock(mutex);
  int count = 0;
  for (const auto& comm : state.comms) count += comm->ended ? 0 : 1;
  return count;
}
int open_groups() {
  const Lock lock(mutex);
  return state.open_groups;
}
std::size_t last_count() {
  const Lock lock(mutex);
  return state.last_count;
}
int group_threads() {
  const Lock lock(mutex);
  return static_cast<int>(state.group_threads.size());
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

extern const FakeNccl fake_nccl_table;  // what is const is local otherwise
const FakeNccl fake_nccl_table = {reset,       copy_by,    set_in_progress, hasten, fail,
                                  hang,        linger,     block,           calls,  alive,
                                  open_groups, last_count, group_threads};

nccl::Result ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return nccl::kSuccess;
}

nccl::Result ncclGetUniqueId(nccl::UniqueId* id) {
  Lock lock(mutex);
  id->fill('\0');
  (*id)[0] = static_cast<char>(++state.ids);
  (*id)[127] = 'x';
  return called(lock, "ncclGetUniqueId");
}

nccl::Result ncclCommInitRankConfig(nccl::Comm** out, int size, nccl::UniqueId id, int rank,
                                    nccl::Config* config) {
  Lock lock(mutex);
  *out = nullptr;
  const nccl::Result result = called(lock, "ncclCommInitRankConfig");
  if (result != nccl::kSuccess) return result;
  if (config->magic != 0xcafebeef || config->size != 24 || config->blocking < 0 ||
      config->blocking > 1 || id[127] != 'x' || rank < 0 || rank >= size)
    return misuse();
  auto& world = state.worlds[std::string(id.begin(), id.end())];
  if (world == nullptr) world = std::make_shared<World>();
  world->size = size;
  if (!world->arrived.insert(rank).second) return misuse();
  auto& comm = *state.comms.emplace_back(std::make_unique<nccl::Comm>());
  comm.world = world;
  comm.rank = rank;
  comm.blocks = config->blocking == 1;
  *out = &comm;
  return begin(lock, comm, "ncclCommInitRankConfig");
}

nccl::Result ncclCommGetAsyncError(nccl::Comm* comm, nccl::Result* error) {
  Lock lock(mutex);
  if (comm == nullptr || comm->ended) return misuse();
  const nccl::Result failed = called(lock, "ncclCommGetAsyncError", comm);
  if (failed != nccl::kSuccess) comm->error = failed;
  *error = comm->error != nccl::kSuccess ? comm->error
           : in_progress(*comm)          ? nccl::kInProgress
                                         : nccl::kSuccess;
  if (comm->questions > 0) --comm->questions;
  return nccl::kSuccess;
}

nccl::Result ncclCommFinalize(nccl::Comm* comm) {
  Lock lock(mutex);
  const nccl::Result result = called(lock, "ncclCommFinalize", comm);
  if (!usable(comm) || comm->finalized) return misuse();
  if (result != nccl::kSuccess) return result;
  comm->finalized = true;
  return begin(lock, *comm, "ncclCommFinalize");
}

nccl::Result ncclCommDestroy(nccl::Comm* comm) {
  Lock lock(mutex);
  if (!usable(comm)) return misuse();
  return end(lock, comm, "ncclCommDestroy", false);
}

#ifndef FAKE_NCCL_LACKS_ABORT
nccl::Result ncclCommAbort(nccl::Comm* comm) {
  Lock lock(mutex);
  return end(lock, comm, "ncclCommAbort", true);
}
#endif

nccl::Result ncclGroupStart() {
  Lock lock(mutex);
  const nccl::Result result = called(lock, "ncclGroupStart");
  if (result != nccl::kSuccess) return result;
  ++state.open_groups;
  if (++group.depth > 1) misuse();
  return nccl::kSuccess;
}

nccl::Result ncclGroupEnd() {
  Lock lock(mutex);
  if (group.depth == 0) return misuse();
  const Group ended = std::exchange(group, {});
  nccl::Comm* comm = ended.comm();
  const nccl::Result result = called(lock, "ncclGroupEnd", comm);
  --state.open_groups;
  state.group_threads.insert(std::this_thread::get_id());
  if (ended.error != nccl::kSuccess) return ended.error;
  if (result != nccl::kSuccess || comm == nullptr) return result;
  if (comm->ended) return nccl::kInternalError;  // aborted while it was blocked
  for (const Message& message : ended.messages) post(message);
  for (const CollectiveCall& call : ended.collectives) post(call);
  return begin(lock, *comm, "ncclGroupEnd");
}

nccl::Result ncclSend(const void* data, std::size_t count, nccl::DataType type, int peer,
                      nccl::Comm* comm, Stream stream) {
  return add("ncclSend", {comm, data, nullptr, count, peer, stream}, count, type);
}
nccl::Result ncclRecv(void* data, std::size_t count, nccl::DataType type, int peer,
                      nccl::Comm* comm, Stream stream) {
  return add("ncclRecv", {comm, nullptr, data, count, peer, stream}, count, type);
}

nccl::Result ncclAllReduce(const void* in, void* out, std::size_t count, nccl::DataType type,
                           nccl::RedOp op, nccl::Comm* comm, Stream stream) {
  return add("ncclAllReduce", {Collective::kAllReduce, comm, in, out, count, type, op, 0, stream});
}
nccl::Result ncclReduceScatter(const void* in, void* out, std::size_t count, nccl::DataType type,
                               nccl::RedOp op, nccl::Comm* comm, Stream stream) {
  return add("ncclReduceScatter",
             {Collective::kReduceScatter, comm, in, out, count, type, op, 0, stream});
}
nccl::Result ncclAllGather(const void* in, void* out, std::size_t count, nccl::DataType type,
                           nccl::Comm* comm, Stream stream) {
  return add("ncclAllGather", {Collective::kAllGather, comm, in, out, count, type, {}, 0, stream});
}
nccl::Result ncclAlltoAll(const void* in, void* out, std::size_t count, nccl::DataType type,
                          nccl::Comm* comm, Stream stream) {
  return add("ncclAlltoAll", {Collective::kAllToAll, comm, in, out, count, type, {}, 0, stream});
}
nccl::Result ncclBroadcast(const void* in, void* out, std::size_t count, nccl::DataType type,
                           int root, nccl::Comm* comm, Stream stream) {
  return add("ncclBroadcast",
             {Collective::kBroadcast, comm, in, out, count, type, {}, root, stream});
}
nccl::Result ncclReduce(const void* in, void* out, std::size_t count, nccl::DataType type,
                        nccl::RedOp op, int root, nccl::Comm* comm, Stream stream) {
  return add("ncclReduce", {Collective::kReduce, comm, in, out, count, type, op, root, stream});
}

const char* ncclGetErrorString(nccl::Result result) {
  return result == nccl::kRemoteError ? "remote process exited" : "an error of the fake";
}
const char* ncclGetLastError(nccl::Comm*) { return "as the test wanted"; }

}  // extern "C"
#pragma GCC visibility pop
