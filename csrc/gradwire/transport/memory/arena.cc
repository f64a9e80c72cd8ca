#include "gradwire/transport/memory/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "gradwire/base/error.h"
#include "gradwire/base/memory_file.h"

namespace gradwire::transport {
namespace {

constexpr std::uint32_t kArenaMagic = 0x33415247;  // "GRA3"; changes with the layout
constexpr std::size_t kEntry = 2 * kLine;          // two writers must not share a line
constexpr std::size_t kPage = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::byte* map_shared(int memory, std::size_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (base == MAP_FAILED) throw Error(system_message("mmap of a shared arena", errno));
  return static_cast<std::byte*>(base);
}

bool is_sealed(int memory, std::size_t bytes) {
  struct stat info{};
  return ::fstat(memory, &info) == 0 && info.st_size == static_cast<off_t>(bytes) &&
         ::fcntl(memory, F_GET_SEALS) == kSeals;
}

}  // namespace

OpenedTransport open_shared_memory(const Settings&) {
  const UniqueFd memory = make_memory_file("gradwire-probe");
  if (memory.valid()) return {};
  return {.why_not = system_message("memfd_create is not possible here", errno)};
}

struct Arena::Header {
  std::uint32_t magic;
  std::int32_t owner;
  alignas(kLine) std::atomic<std::uint32_t> sleeping;
  alignas(kLine) std::atomic<std::uint32_t> wants_room;
};

Arena::ArenaLayout::ArenaLayout(const LinkOptions& options)
    : messages(gradwire::at(options.messages)),
      far_at(sizeof(Header) + messages * kLine),
      entries_at(far_at + gradwire::at(options.size) * kLine),
      data_at(round_up(entries_at + gradwire::at(options.size) * messages * kEntry, kPage)),
      stride(round_up(options.max_message, kPage) + kPage),  // no prefetch runs into the next cell
      total(data_at + messages * stride) {}

Arena::Arena(UniqueFd memory, const LinkOptions& options)
    : memory_(std::move(memory)),
      layout_(options),
      base_(map_shared(memory_.get(), layout_.total)) {}

Arena::~Arena() { ::munmap(base_, layout_.total); }

std::shared_ptr<Arena> Arena::create(const LinkOptions& options) {
  UniqueFd memory = make_memory_file("gradwire");
  if (!memory.valid()) throw Error(system_message("memfd_create", errno));
  if (::ftruncate(memory.get(), static_cast<off_t>(ArenaLayout(options).total)) != 0 ||
      ::fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0)
    throw Error(system_message("making a sealed shared arena", errno));
  std::shared_ptr<Arena> arena(new Arena(std::move(memory), options));
  arena->at<Header>(0).magic = kArenaMagic;
  arena->at<Header>(0).owner = options.rank;
  return arena;
}

std::shared_ptr<Arena> Arena::map(UniqueFd memory, const LinkId& link, const LinkOptions& options) {
  if (!is_sealed(memory.get(), ArenaLayout(options).total))
    throw_transport_error(link, "the peer's memory is not sealed or has another size");
  std::shared_ptr<Arena> arena(new Arena(std::move(memory), options));
  const Header& header = arena->at<Header>(0);
  if (header.magic != kArenaMagic || header.owner != link.peer)
    throw_transport_error(link, "the peer's memory is no arena of its own");
  arena->close_descriptor();
  return arena;
}

template <typename Value>
Value& Arena::at(std::size_t offset) const noexcept {
  return *reinterpret_cast<Value*>(base_ + offset);
}

std::atomic<std::uint32_t>& Arena::sleeping() noexcept { return at<Header>(0).sleeping; }

std::atomic<std::uint32_t>& Arena::wants_room() noexcept { return at<Header>(0).wants_room; }

std::atomic<std::uint32_t>& Arena::readers(std::size_t cell) noexcept {
  return at<std::atomic<std::uint32_t>>(sizeof(Header) + cell * kLine);
}

std::atomic<std::uint32_t>& Arena::far(Rank reader) noexcept {
  return at<std::atomic<std::uint32_t>>(layout_.far_at + gradwire::at(reader) * kLine);
}

std::atomic<std::uint64_t>& Arena::entry(Rank reader, std::size_t position) noexcept {
  const std::size_t index = gradwire::at(reader) * layout_.messages + position;
  return at<std::atomic<std::uint64_t>>(layout_.entries_at + index * kEntry);
}

std::byte* Arena::small(Rank reader, std::size_t position) noexcept {
  return reinterpret_cast<std::byte*>(&entry(reader, position)) + sizeof(std::uint64_t);
}

std::byte* Arena::data(std::size_t cell) noexcept {
  return base_ + layout_.data_at + cell * layout_.stride;
}

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(std::uint64_t) + kSmallMessage == kEntry);

}  // namespace gradwire::transport
