// Which libnccl is loaded, and what is said where none can be.
#include "gradwire/cuda/nccl/nccl.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "fake_nccl.h"
#include "gradwire/base/error.h"

namespace gradwire::cuda {
namespace {

using Files = std::vector<std::string>;

// In a process of its own, since what is loaded stays; what it says.
std::string alone(const std::function<std::string()>& say) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string said = say();
    const ssize_t written = ::write(ends[1], said.data(), said.size());
    ::_exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
  }
  ::close(ends[1]);
  std::string said;
  std::array<char, 4096> part{};
  for (ssize_t got = 0; (got = ::read(ends[0], part.data(), part.size())) > 0;)
    said.append(part.data(), static_cast<std::size_t>(got));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? said : said + " [ended with status " + std::to_string(status) + "]";
}

std::string loaded(const char* named, const Files& search) {
  if (named == nullptr)
    ::unsetenv("GRADWIRE_NCCL_SO");
  else
    ::setenv("GRADWIRE_NCCL_SO", named, 1);
  try {
    const Nccl& nccl = Nccl::load(search);
    return version_text(nccl.version) + " | " + nccl.library + " | " + nccl.origin;
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

std::string load(const char* named, const Files& search) {
  return alone([&] { return loaded(named, search); });
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
}

const std::string kFake = GRADWIRE_FAKE_NCCL, kNamed = GRADWIRE_NAMED_NCCL;

bool system_has_one() { return load(nullptr, {}).find("does not load") == std::string::npos; }

TEST(NcclLibrary, TheVariableNamesItAndNothingElseIsLookedFor) {
  EXPECT_EQ(load(kFake.c_str(), {kNamed}), "2.28.9 | " + kFake + " | GRADWIRE_NCCL_SO");
  const std::string said = load("/nowhere/libnccl.so.2", {kFake});
  expect_words(said, {"GRADWIRE_NCCL_SO=/nowhere/libnccl.so.2", "does not load",
                      "No such file or directory", "unset it"});
}

TEST(NcclLibrary, AnEmptyVariableIsNone) {
  EXPECT_EQ(load("", {kFake}), "2.28.9 | " + kFake + " | pip's wheel");
}

TEST(NcclLibrary, WhatIsLoadedAlreadyComesFirst) {
  const std::string said = alone([] {
    if (::dlopen(kNamed.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) return std::string("not open");
    return loaded(nullptr, {kFake});
  });
  EXPECT_EQ(said, "2.28.9 | " + kNamed + " | loaded already");
}

TEST(NcclLibrary, FilesAreTriedInTheirOrder) {
  EXPECT_EQ(load(nullptr, {"/nowhere/libnccl.so.2", kFake, kNamed}),
            "2.28.9 | " + kFake + " | pip's wheel");
}

TEST(NcclLibrary, AnAbsentOneSaysWhereItWasLookedForAndWhatToInstall) {
  if (system_has_one()) GTEST_SKIP() << "this machine has a libnccl.so.2";
  expect_words(load(nullptr, {"/nowhere/libnccl.so.2"}),
               {"NCCL does not load", "/nowhere/libnccl.so.2", "; libnccl.so.2: cannot open",
                "pip install nvidia-nccl-cu13", "GRADWIRE_NCCL_SO"});
}

TEST(NcclLibrary, AnOldOneSaysItsVersionAndTheLeast) {
  expect_words(load(GRADWIRE_OLD_NCCL, {}),
               {"NCCL 2.16.5", GRADWIRE_OLD_NCCL, "too old", "2.19.0", "pip install"});
}

TEST(NcclLibrary, AMissingSymbolIsNamed) {
  expect_words(load(GRADWIRE_LACKING_NCCL, {}),
               {GRADWIRE_LACKING_NCCL, "needs its ncclCommAbort", "pip install"});
}

TEST(NcclLibrary, AnotherLibraryIsNotNccl) {
  expect_words(load("libm.so.6", {}), {"not NCCL", "libm.so.6", "needs its ncclGetVersion"});
}

TEST(NcclLibrary, AFileThatIsNoLibraryIsRefused) {
  const std::string file = testing::TempDir() + "no_library_" + std::to_string(::getpid());
  std::ofstream(file) << std::string(4096, 'x');
  expect_words(load(file.c_str(), {}), {"does not load", file, "invalid ELF header"});
  std::filesystem::remove(file);
}

TEST(NcclLibrary, IsLoadedOnceAndAfterAFailureLookedForAgain) {
  const std::string said = alone([] {
    for (int i = 0; i < 2; ++i) loaded("libm.so.6", {});
    loaded(kFake.c_str(), {});
    const Nccl* first = &Nccl::load();
    return std::string(first == &Nccl::load({kNamed}) ? "the same" : "another");
  });
  EXPECT_EQ(said, "the same");
}

TEST(NcclLibrary, VersionsBefore29CountOtherwise) {
  EXPECT_EQ(version_text(23203), "2.32.3");
  EXPECT_EQ(version_text(2804), "2.8.4");
}

}  // namespace
}  // namespace gradwire::cuda
