// Messages over a fake NCCL, whose ranks are threads.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "fake_nccl.h"
#include "gradwire/base/error.h"
#include "gradwire/cuda/messages/messages_nccl.h"
#include "transport_harness.h"

namespace gradwire::cuda {

using Payload = std::vector<std::byte>;
using All = std::vector<std::unique_ptr<Messages>>;

using transport::run_threads;

// Of all ranks, which share a world.
inline All nccl_messages(const Nccl& nccl, int size) {
  const nccl::UniqueId id = make_unique_id(nccl);
  All all(static_cast<std::size_t>(size));
  run_threads(size, [&](int rank) {
    NcclSettings settings;
    settings.rank = rank;
    settings.size = size;
    all[static_cast<std::size_t>(rank)] = make_nccl_messages(nccl, id, settings);
  });
  return all;
}

// What `call` throws, which must be of this kind.
template <typename Kind, typename Call>
Kind thrown_by(Call call) {
  try {
    call();
  } catch (const Kind& error) {
    return error;
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string("another error: ") + error.what());
  }
  throw std::runtime_error("no error");
}

inline void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
}

inline Payload filled(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  Payload made(bytes);
  for (std::byte& each : made) each = static_cast<std::byte>(random());
  return made;
}

// Every test finds the fake as new, and leaves no communicator and no group in it.
class OverFakeNccl : public testing::Test {
 protected:
  // `blocks`: communicators do.
  explicit OverFakeNccl(bool blocks) : blocks_(blocks) { fake.reset(); }
  ~OverFakeNccl() override {
    EXPECT_EQ(fake.calls("misuse"), 0);
    EXPECT_EQ(fake.alive(), 0);
    EXPECT_EQ(fake.open_groups(), 0);
    EXPECT_LT(Deadline::Clock::now() - begun_, std::chrono::seconds(100)) << "something hung";
    fake.reset();
  }

  static const Nccl& nccl() {
    ::setenv("GRADWIRE_NCCL_SO", GRADWIRE_FAKE_NCCL, 1);
    return Nccl::load();
  }
  std::unique_ptr<Messages> join(const nccl::UniqueId& id, Rank rank, int size,
                                 NcclSettings settings = {}) const {
    settings.rank = rank;
    settings.size = size;
    settings.blocking = blocks_;
    return make_nccl_messages(nccl(), id, settings);
  }
  // Rank 0, whose peers never come.
  std::unique_ptr<Messages> first(int size, NcclSettings settings = {}) const {
    return join(make_unique_id(nccl()), 0, size, std::move(settings));
  }
  std::unique_ptr<Messages> alone(NcclSettings settings = {}) const {
    return first(1, std::move(settings));
  }
  All mesh(int size, const NcclSettings& settings = {}) const {
    All all(static_cast<std::size_t>(size));
    const nccl::UniqueId id = make_unique_id(nccl());
    run_threads(size,
                [&](int r) { all[static_cast<std::size_t>(r)] = join(id, r, size, settings); });
    return all;
  }

  // To itself, which a rank alone can do.
  static void talk(Messages& self) {
    Payload sent = filled(64, 1), got(64);
    self.begin();
    self.send(sent.data(), sent.size(), 0);
    self.receive(got.data(), got.size(), 0);
    self.end(nullptr);
    EXPECT_EQ(got, sent);
  }
  // A group of rank 0 that nobody answers.
  static void wait_in_vain(Messages& self) {
    static std::byte ignored{};
    self.begin();
    self.receive(&ignored, 1, 1);
    self.end(nullptr);
  }

  const FakeNccl& fake = fake_nccl();

 private:
  const bool blocks_;
  const Deadline::Clock::time_point begun_ = Deadline::Clock::now();
};

}  // namespace gradwire::cuda
