#include "gradwire/cuda/messages/messages_ipc.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "gradwire/base/run_with_timeout.h"

namespace gradwire::cuda {
namespace {

constexpr double kIdleSeconds = 5;

std::uint64_t random_number() {
  std::random_device random;
  return (std::uint64_t{random()} << 32 | random()) | 1;
}

std::uint64_t this_process() {
  static const std::uint64_t number = random_number();
  return number;
}

int current_device(const Api& api) {
  int device = 0;
  check(api, api.get_device(&device), "cudaGetDevice");
  return device;
}

// Another rank's staging that is mapped here, and its generation. The first word of the memory is
// that generation for as long as that rank maps this one's staging.
struct Mapping {
  const void* at = nullptr;
  bool is_imported = false;
  std::uint64_t generation = 0;
};

// Staging that is out of use here.
struct Retired {
  const Api* api = nullptr;
  int device = 0;
  std::size_t bytes = 0;
  std::byte* data = nullptr;
  std::vector<Mapping> others;
};

std::mutex retired_mutex;
std::vector<Retired>& all_retired() {
  static auto* const all = new std::vector<Retired>;  // never destroyed
  return *all;
}

std::uint64_t read_word(const Api& api, const void* at, Stream stream) {
  std::uint64_t word = 0;
  check(api, api.copy(&word, at, sizeof word, CopyKind::kToHost, stream), "cudaMemcpyAsync");
  check(api, api.synchronize(stream), "cudaStreamSynchronize");
  return word;
}

void write_word(const Api& api, void* at, std::uint64_t word, Stream stream) {
  check(api, api.copy(at, &word, sizeof word, CopyKind::kToDevice, stream), "cudaMemcpyAsync");
  check(api, api.synchronize(stream), "cudaStreamSynchronize");
}

// Whether the rank has ended its mapping of this memory. Where its own can't be read any more,
// nobody knows: false.
bool has_ended(const Api& api, const Mapping& each, Stream stream) noexcept {
  try {
    return read_word(api, each.at, stream) != each.generation;
  } catch (const Error&) {
    return false;
  }
}

// Ends the mappings of ranks that have ended theirs, and returns whether all have.
bool is_free(Retired& retired, Stream stream) noexcept {
  const Api& api = *retired.api;
  std::erase_if(retired.others, [&](const Mapping& each) {
    if (!has_ended(api, each, stream)) return false;
    if (each.is_imported) api.close_memory(const_cast<void*>(each.at));
    return true;
  });
  return retired.others.empty();
}

// Returns memory that was retired and that nobody uses any more; null if there is none.
std::byte* take_retired(const Api& api, int device, std::size_t bytes, Stream stream) {
  const std::lock_guard lock(retired_mutex);
  std::vector<Retired>& all = all_retired();
  std::byte* found = nullptr;
  std::erase_if(all, [&](Retired& each) {
    if (each.api != &api || each.device != device || !is_free(each, stream)) return false;
    if (found != nullptr || each.bytes != bytes) return false;
    found = each.data;
    return true;
  });
  return found;
}

void retire(Retired retired, Stream stream) {
  write_word(*retired.api, retired.data, 0, stream);  // its rank maps nothing any more
  const std::lock_guard lock(retired_mutex);
  all_retired().push_back(std::move(retired));
}

}  // namespace

OwnStaging::OwnStaging(const Api& api, int size) : api_(api), size_(size) {
  if (size > kMostMapped)
    throw InvalidArgument("GPUs can map each other's memory for up to " +
                          std::to_string(kMostMapped) + " ranks, and there are " +
                          std::to_string(size) + ": let them exchange messages over NCCL");
  const OwnedStream stream(api);
  const std::size_t bytes = api.staging_bytes(size);
  address_.process = this_process();
  address_.generation = random_number();
  address_.device = current_device(api);
  data_ = take_retired(api, address_.device, bytes, stream.get());
  if (data_ == nullptr) {
    void* fresh = nullptr;
    check(api, api.allocate(&fresh, bytes), "cudaMalloc");
    data_ = static_cast<std::byte*>(fresh);
  }
  check(api, api.fill(data_, 0, bytes, stream.get()), "cudaMemsetAsync");
  write_word(api, data_, address_.generation, stream.get());
  address_.at = reinterpret_cast<std::uintptr_t>(data_);
  address_.is_exported = api.export_memory(data_, &address_.handle) == 0 ? 1 : 0;
}

// Others may have mapped it, but only read its first word.
OwnStaging::~OwnStaging() {
  if (data_ == nullptr) return;
  try {
    const OnDevice here(api_, address_.device);
    const OwnedStream stream(api_);
    retire({&api_, address_.device, api_.staging_bytes(size_), data_, {}}, stream.get());
  } catch (const Error&) {  // the device has failed: its memory is of no use
  }
}

IpcMessages::IpcMessages(const Api& api, Rank rank, std::unique_ptr<OwnStaging> own,
                         std::span<const StagingAddress> all, std::uint64_t one_shot_bytes)
    : api_(api),
      one_shot_bytes_(one_shot_bytes),
      own_(std::move(own)),
      all_(all.begin(), all.end()),
      imported_(all.size(), nullptr),
      device_(current_device(api)),
      pinned_(api, Room::Kind::kPinned) {
  ended_ = reinterpret_cast<std::uint32_t*>(pinned_.take(sizeof(std::uint32_t)));
  *ended_ = 0;
  staging_.ended = ended_;
  staging_.rank = rank;
  staging_.size = static_cast<int>(all.size());
  try {
    for (std::size_t r = 0; r < all.size(); ++r) map(static_cast<Rank>(r), all[r]);
  } catch (...) {
    for (void* each : imported_)
      if (each != nullptr) api.close_memory(each);
    throw;
  }
}

void IpcMessages::map(Rank rank, const StagingAddress& address) {
  const auto r = static_cast<std::size_t>(rank);
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument("rank " + std::to_string(staging_.rank) + ": the memory of rank " +
                          std::to_string(rank) + "'s GPU can't be mapped: " + why);
  };
  if (address.process == this_process()) {
    if (const Status status = api_.use_peer(address.device); status != 0)
      refuse(api_.describe(status));
    staging_.of[r] = reinterpret_cast<std::byte*>(address.at);
    return;
  }
  if (address.is_exported == 0) refuse("its device does not export memory to other processes");
  if (const Status status = api_.import_memory(&address.handle, &imported_[r]); status != 0)
    refuse(api_.describe(status));
  staging_.of[r] = static_cast<std::byte*>(imported_[r]);
}

// Where ranks have parted, or failed, their processes may have ended by now, and nothing in their
// memory may be read; else their first words tell when they have. After a failure nobody knows
// whether others read this memory still, so it is not used again.
IpcMessages::~IpcMessages() {
  std::byte* const data = std::exchange(own_->data_, nullptr);
  if (!rest()) return;
  try {
    const OnDevice here(api_, device_);
    const OwnedStream stream(api_);
    bool may_be_read = false;
    Retired retired{&api_, device_, api_.staging_bytes(own_->size()), data, {}};
    for (std::size_t r = 0; r < all_.size(); ++r) {
      if (std::cmp_equal(r, staging_.rank)) continue;
      const bool is_imported = imported_[r] != nullptr;
      may_be_read = may_be_read || (aborted_ && is_imported);
      if (is_imported && (has_parted_ || aborted_))
        api_.close_memory(imported_[r]);
      else if (!has_parted_)
        retired.others.push_back({staging_.of[r], is_imported, all_[r].generation});
    }
    if (may_be_read)
      write_word(api_, data, 0, stream.get());
    else
      retire(std::move(retired), stream.get());
  } catch (const Error&) {  // the device has failed: its memory is of no use
  }
}

void IpcMessages::begin() {
  check();
  posted_.clear();
}

void IpcMessages::post(const StagedMessage& message) {
  if (message.peer < 0 || message.peer >= staging_.size || message.peer == staging_.rank)
    throw InvalidArgument("there is no other rank " + std::to_string(message.peer) + " among " +
                          std::to_string(staging_.size));
  if (message.bytes > 0) posted_.push_back(message);
}

void IpcMessages::send(const std::byte* data, std::size_t bytes, Rank peer,
                       std::span<const Slotted> /*layout*/) {
  post({const_cast<std::byte*>(data), bytes, peer, true});
}

void IpcMessages::receive(std::byte* data, std::size_t bytes, Rank peer,
                          std::span<const Slotted> /*layout*/) {
  post({data, bytes, peer, false});
}

void IpcMessages::end(Stream stream) {
  check();
  if (posted_.empty()) return;
  if (std::cmp_greater(posted_.size(), kMostStaged))
    throw InvalidArgument("a round of more than " + std::to_string(kMostStaged) +
                          " messages of a rank: take another schedule, or NCCL");
  cuda::check(api_,
              api_.exchange(staging_, posted_.data(), static_cast<int>(posted_.size()), stream),
              "exchanging messages by mapped memory");
}

void IpcMessages::reduce(std::span<const SummedRun> runs, const Sum& sum, Stream stream) {
  check();
  std::uint64_t bytes = 0;
  for (const SummedRun& each : runs) bytes += each.n * size_of(sum.dtype);
  const bool one_shot =
      staging_.size == 2 || bytes * static_cast<std::uint64_t>(staging_.size) <= one_shot_bytes_;
  cuda::check(
      api_,
      api_.reduce_staged(staging_, static_cast<int>(sum.dtype), static_cast<int>(sum.op),
                         runs.data(), static_cast<int>(runs.size()), sum.divisor, one_shot, stream),
      "summing by mapped memory");
}

void IpcMessages::check() {
  if (aborted_)
    throw Aborted("rank " + std::to_string(staging_.rank) + " aborted its GPU's messages");
}

// Kernels that wait end; those that do not, and later ones, find bytes that never came.
void IpcMessages::abort() noexcept {
  aborted_ = true;
  lose();
  std::atomic_ref(*ended_).store(1);
}

bool IpcMessages::rest() noexcept {
  if (is_idle()) return true;
  abort();
  return is_idle();
}

bool IpcMessages::is_idle() const noexcept {
  try {
    const auto well = std::make_shared<std::atomic<bool>>(false);
    const bool in_time = run_with_timeout(kIdleSeconds, [&api = api_, device = device_, well] {
      api.set_device(device);
      api.relax_captures();
      *well = api.synchronize_device() == 0;
    });
    return in_time && *well;
  } catch (const std::exception&) {  // no thread could be started
    return false;
  }
}

}  // namespace gradwire::cuda
