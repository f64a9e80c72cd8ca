// Links over the fake libibverbs, for the tests of what goes wrong and of what is asked of a
// device.
#pragma once

#include <array>
#include <optional>

#include "fake_ibverbs.h"
#include "transport_harness.h"

namespace gradwire::transport {

// Every test finds the fake as new, and leaves nothing in it.
class FakeRdma : public testing::Test {
 protected:
  FakeRdma() { fake.reset(); }
  ~FakeRdma() override {
    EXPECT_EQ(fake.calls("overflow"), 0);
    EXPECT_EQ(fake.alive(), 0);
    fake.reset();
  }

  static std::shared_ptr<RdmaDevices> devices(RdmaSettings settings = {}) {
    settings.library = GRADWIRE_FAKE_IBVERBS;
    return std::make_shared<RdmaDevices>(settings);
  }
  static LinkOptions options() {
    return {.size = 2, .max_message = 64 * 1024, .messages = 4, .context = devices()};
  }
  static Transports mesh(int size) { return connect("rdma", size, options()); }

  // Two ranks that make a link; of an end that could not, why.
  struct Couple {
    std::array<std::unique_ptr<Transport>, 2> ends;
    std::array<std::string, 2> errors;
  };
  static Couple couple(const LinkOptions& lower, const LinkOptions& higher,
                       double seconds = kTestSeconds) {
    const std::array<const LinkOptions*, 2> wanted{&lower, &higher};
    Ends ends = tcp_ends();
    std::array<UniqueFd, 2> sockets{std::move(ends.first), std::move(ends.second)};
    Couple made;
    run_threads(2, [&](int side) {
      const auto i = static_cast<std::size_t>(side);
      try {
        auto self = make_transport("rdma", *wanted[i]);
        self->adopt(std::move(sockets[i]), wanted[1 - i]->rank, seconds);
        made.ends[i] = std::move(self);
      } catch (const Error& error) {
        made.errors[i] = error.what();
      }
    });
    return made;
  }
  static LinkOptions of_rank(Rank rank, LinkOptions options) {
    options.rank = rank;
    return options;
  }

  const FakeIbverbs& fake = fake_ibverbs();
};

// What `call` throws, which must be of this kind.
template <typename Kind, typename Call>
std::string thrown_by(Call call) {
  try {
    call();
  } catch (const Kind& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

inline void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
}

}  // namespace gradwire::transport
