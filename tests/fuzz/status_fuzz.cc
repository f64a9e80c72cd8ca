// The page on which a rank publishes what it does: who reads it opens another process's memory.
//   input: the page
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "fuzz.h"
#include "gradwire/exec/control/status_scan.h"

namespace gradwire::fuzz {
namespace {

UniqueFd page_of(const std::uint8_t* data, std::size_t size) {
  UniqueFd memory(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  require(::ftruncate(memory.get(), sizeof(exec::StatusPage)) == 0);
  const std::size_t bytes = std::min(size, sizeof(exec::StatusPage));
  require(::pwrite(memory.get(), data, bytes, 0) == static_cast<ssize_t>(bytes));
  return memory;
}

void require_printable(const std::string& text) {
  for (const char c : text) require(c >= ' ' && c < '\x7f');
}

}  // namespace
}  // namespace gradwire::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gradwire::fuzz;
  const NoDescriptorLeft none;
  const auto memory = page_of(data, size);
  const auto page = gradwire::exec::read_status(memory.get());
  if (!page) return 0;
  const gradwire::exec::RankStatus seen{1, 'S', *page};
  require(page->peer() >= gradwire::kNoPeer && page->peer() < page->size);
  require_printable(describe(seen));
  require_printable(gradwire::exec::operation_of(*page));
  require_printable({page->job.data(), strnlen(page->job.data(), page->job.size())});
  return 0;
}
