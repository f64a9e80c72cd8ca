#include "gradwire/exec/control/status.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "gradwire/base/deadline.h"
#include "gradwire/base/memory_file.h"

namespace gradwire::exec {
namespace {

constexpr std::uint64_t kMagic = 0x3154415453575247;  // "GRWSTAT1"; a new layout takes a new magic
constexpr std::uint64_t kNobody = ~std::uint64_t{0};
constexpr int kMostRanks = 1 << 20;
// How often a reader tries before it takes the writer to be stopped in the middle of an update.
constexpr int kTries = 10000;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

static_assert(std::is_trivially_copyable_v<StatusPage> && sizeof(StatusPage) <= 4096);
static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);

UniqueFd make_memory() {
  UniqueFd memory = make_memory_file(kStatusName);
  const bool made = memory.valid() && ::ftruncate(memory.get(), sizeof(StatusPage)) == 0 &&
                    ::fcntl(memory.get(), F_ADD_SEALS, kSeals) == 0;
  return made ? std::move(memory) : UniqueFd();
}

StatusPage* map(int memory) {
  const int flags = memory < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* base = ::mmap(nullptr, sizeof(StatusPage), PROT_READ | PROT_WRITE, flags, memory, 0);
  if (base == MAP_FAILED) throw Error(system_message("mmap of a status page", errno));
  return static_cast<StatusPage*>(base);
}

template <typename Text>
void copy_text(Text& to, std::string_view from) noexcept {
  from = from.substr(0, sizeof to - 1);
  std::memset(to.data(), 0, sizeof to);
  std::memcpy(to.data(), from.data(), from.size());
}

void publish(std::uint64_t& word, std::uint64_t value) noexcept {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

bool read_all(int descriptor, void* to, std::size_t bytes, std::size_t offset) {
  return ::pread(descriptor, to, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes);
}

// Orders two reads by the kernel, which the language's memory orders do not cover: a processor may
// make the later one first.
void order_reads() noexcept {
#ifndef __SANITIZE_THREAD__  // which does not model fences
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

bool read_version(int descriptor, std::uint64_t& version) {
  return read_all(descriptor, &version, sizeof version, offsetof(StatusPage, version));
}

bool is_valid(const StatusPage& page) {
  const auto& current = page.current;
  return page.magic == kMagic && page.pid > 0 && page.size > 0 && page.size <= kMostRanks &&
         page.rank >= 0 && page.rank < page.size && page.local_size > 0 &&
         page.local_size <= page.size && page.activity() >= Activity::kOutside &&
         page.activity() <= Activity::kFailed &&
         (current.peer == kNobody || current.peer < static_cast<std::uint64_t>(page.size));
}

// Terminates an untrusted text, and replaces characters that could control a terminal.
void sanitize(char* text, std::size_t size) {
  text[size - 1] = '\0';
  for (char* each = text; *each != '\0'; ++each)
    if (*each < ' ' || *each > '~') *each = '?';
}

}  // namespace

std::uint64_t coarse_now() noexcept {
  return static_cast<std::uint64_t>(CoarseClock::now().time_since_epoch().count());
}

std::string StatusPage::spec() const {
  if (current.spec_of != current.fingerprint) return {};
  return reinterpret_cast<const char*>(current.spec.data());
}

// Keeps the version odd for as long as it lives. The stores in between are release stores: none
// becomes visible before the odd version, or after the even one.
class Status::Update {
 public:
  explicit Update(StatusPage& page) noexcept : page_(page), version_(page.version) {
    std::atomic_ref(page_.version).store(version_ + 1, std::memory_order_relaxed);
  }
  ~Update() { publish(page_.version, version_ + 2); }
  Update(const Update&) = delete;
  Update& operator=(const Update&) = delete;

  void set(std::uint64_t StatusPage::Current::* field, std::uint64_t value) noexcept {
    publish(page_.current.*field, value);
  }
  void spec(std::uint32_t fingerprint, std::string_view text) noexcept {
    std::array<std::uint64_t, 32> words;
    copy_text(words, text);
    for (std::size_t i = 0; i < words.size(); ++i) publish(page_.current.spec[i], words[i]);
    set(&StatusPage::Current::spec_of, fingerprint);
    set(&StatusPage::Current::fingerprint, fingerprint);
  }

 private:
  StatusPage& page_;
  std::uint64_t version_;
};

Status::Status(const Identity& identity) : memory_(make_memory()), page_(map(memory_.get())) {
  page_->pid = ::getpid();
  page_->rank = identity.rank;
  page_->size = identity.size;
  page_->local_size = identity.ranks_on_host();
  page_->communicator = identity.communicator;
  page_->tag = identity.tag;
  copy_text(page_->job, identity.job);
  copy_text(page_->about, identity.about);
  set_moving(/*outside=*/true);
  publish(page_->magic, kMagic);
}

void Status::begin(std::uint32_t call, std::uint32_t fingerprint, std::uint64_t now) noexcept {
  Update update(*page_);
  update.set(&StatusPage::Current::activity, static_cast<std::uint64_t>(Activity::kCall));
  update.set(&StatusPage::Current::calls, std::uint64_t{call} + 1);
  update.set(&StatusPage::Current::fingerprint, fingerprint);
  update.set(&StatusPage::Current::peer, kNobody);
  update.set(&StatusPage::Current::since, now);
}

void Status::set_waiting(const Wait& wait, std::uint64_t since) noexcept {
  Update update(*page_);
  update.set(&StatusPage::Current::activity, static_cast<std::uint64_t>(wait.activity));
  update.set(&StatusPage::Current::since, since);
  if (wait.activity != Activity::kCall) update.set(&StatusPage::Current::message, wait.number);
  update.set(&StatusPage::Current::peer,
             wait.peer < 0 ? kNobody : static_cast<std::uint64_t>(wait.peer));
  update.set(&StatusPage::Current::reads, wait.reads ? 1 : 0);
  update.set(&StatusPage::Current::round, wait.round);
  update.set(&StatusPage::Current::segment, wait.segment);
  update.spec(wait.fingerprint, wait.spec);
}

void Status::set_moving(bool outside) noexcept {
  Update update(*page_);
  update.set(&StatusPage::Current::activity,
             static_cast<std::uint64_t>(outside ? Activity::kOutside : Activity::kCall));
  update.set(&StatusPage::Current::peer, kNobody);
  update.set(&StatusPage::Current::since, coarse_now());
}

void Status::set_failed(std::string_view reason) noexcept {
  if (page_ == nullptr) return;
  Update update(*page_);
  update.set(&StatusPage::Current::activity, static_cast<std::uint64_t>(Activity::kFailed));
  update.set(&StatusPage::Current::peer, kNobody);
  update.set(&StatusPage::Current::since, coarse_now());
  update.spec(0, reason);
}

void Status::release() noexcept {
  if (page_ != nullptr) ::munmap(page_, sizeof(StatusPage));
  page_ = nullptr;
  memory_.reset();
}

std::optional<StatusPage> read_status(int descriptor) {
  StatusPage page;
  std::uint64_t before = 0, after = 1;
  for (int i = 0; i < kTries && (before != after || before % 2 != 0); ++i) {
    if (!read_version(descriptor, before)) return std::nullopt;
    order_reads();
    if (!read_all(descriptor, &page, sizeof page, 0)) return std::nullopt;
    order_reads();
    if (!read_version(descriptor, after)) return std::nullopt;
  }
  if (!is_valid(page)) return std::nullopt;
  sanitize(page.job.data(), sizeof page.job);
  sanitize(page.about.data(), sizeof page.about);
  sanitize(reinterpret_cast<char*>(page.current.spec.data()), sizeof page.current.spec);
  return page;
}

}  // namespace gradwire::exec
