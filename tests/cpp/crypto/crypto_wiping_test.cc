// No memory that is freed keeps a key. This program looks into all that operator delete frees.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "gradwire/crypto/primitives.h"

namespace {
constexpr char kKey[] = "0123456789abcdefghijklmnopqrstuv";
int unwiped = 0;  // blocks that had the key when they were freed

void look_into(const void* memory) {
  if (memory == nullptr) return;
  const std::size_t size = ::malloc_usable_size(const_cast<void*>(memory));
  if (::memmem(memory, size, kKey, sizeof kKey - 1) != nullptr) ++unwiped;
}
}  // namespace

// Not inlined: GCC would compare malloc with the delete it sees, and warn.
[[gnu::noinline]] void* operator new(std::size_t size) {
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  look_into(memory);
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  operator delete(memory);
}

namespace gradwire::crypto::crypto_wiping_test {
namespace {

TEST(CryptoWiping, SeesAKeyInFreedMemory) {
  const int before = unwiped;
  delete new std::string(kKey);
  EXPECT_GT(unwiped, before);
}

TEST(CryptoWiping, AKeyThatIsHashedWithMoreIsNotLeftBehind) {
  const Key key;
  const std::byte number{2};
  const int before = unwiped;
  hmac_sha256(key.bytes(), {bytes_of(kKey), {&number, 1}});
  EXPECT_EQ(unwiped, before);
}

}  // namespace
}  // namespace gradwire::crypto::crypto_wiping_test
