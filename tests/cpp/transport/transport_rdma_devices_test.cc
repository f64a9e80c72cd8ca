// Which devices and ports are used, and what is said where none can be.
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rdma_fake.h"

namespace {

std::optional<rlim_t> lockable;  // what the process may lock, as a test says

}  // namespace

// In place of libc's: what may be locked can't be raised everywhere.
extern "C" int getrlimit(__rlimit_resource_t resource, rlimit* limit) noexcept {
  const auto got = ::syscall(SYS_prlimit64, 0, resource, nullptr, limit);
  if (got == 0 && resource == RLIMIT_MEMLOCK && lockable) limit->rlim_cur = *lockable;
  return static_cast<int>(got);
}

namespace gradwire::transport {
namespace transport_rdma_devices_test {

class RdmaDevicesTest : public FakeRdma {
 protected:
  RdmaDevicesTest() { lockable = RLIM_INFINITY; }
  ~RdmaDevicesTest() override { lockable.reset(); }

  static std::string refusal(const RdmaSettings& settings = {}) {
    return thrown_by<InvalidArgument>([&] { devices(settings); });
  }
  static void expect_refusal(const std::vector<std::string>& words) {
    expect_words(refusal(), words);
  }
  static std::vector<std::string> described(const RdmaSettings& settings = {}) {
    std::vector<std::string> texts;
    const auto found = devices(settings);
    for (const RdmaPort& port : found->ports()) texts.push_back(port.describe());
    return texts;
  }
};
using Texts = std::vector<std::string>;

// --- the library ---

std::string load_failure(const std::string& library) {
  return thrown_by<InvalidArgument>([&] { Verbs::load(library); });
}

TEST(RdmaLibrary, AnAbsentOneSaysWhatToInstall) {
  expect_words(load_failure("libibverbs-of-nobody.so.1"),
               {"libibverbs-of-nobody.so.1", "libibverbs1", "ibverbs-providers", "rdma-core"});
}

TEST(RdmaLibrary, AnotherLibraryIsRefusedByItsFirstMissingSymbol) {
  expect_words(load_failure("libm.so.6"), {"ibv_fork_init@IBVERBS_1.1", "rdma-core"});
}

TEST(RdmaLibrary, ASymbolOfAnotherVersionIsMissing) {
  expect_words(load_failure(GRADWIRE_OLD_IBVERBS),
               {"too old", "_ibv_query_gid_ex@IBVERBS_1.11", "version 32"});
}

TEST(RdmaLibrary, IsLoadedOnceAndAfterAFailureTriedAgain) {
  for (int i = 0; i < 2; ++i) load_failure("libm.so.6");
  const Verbs& verbs = Verbs::load(GRADWIRE_FAKE_IBVERBS);
  EXPECT_EQ(&verbs, &Verbs::load(GRADWIRE_FAKE_IBVERBS));
}

TEST(RdmaLibrary, DevicesOfAnAbsentOneAreRefusedAlike) {
  const RdmaSettings settings{.library = "libibverbs-of-nobody.so.1"};
  expect_words(thrown_by<InvalidArgument>([&] { RdmaDevices devices(settings); }), {"libibverbs1"});
}

// --- the kernel, devices and ports ---

TEST_F(RdmaDevicesTest, AKernelWithoutRdmaSaysWhichModule) {
  fake.hardware()->devices = -1;
  expect_refusal({"no RDMA support", "ib_uverbs", "GRADWIRE_TRANSPORT=shm,tcp"});
}

TEST_F(RdmaDevicesTest, AListThatFailsSaysWhy) {
  fake.fail("ibv_get_device_list", ENOMEM, 0);
  expect_refusal({"cannot be listed", "Cannot allocate memory"});
}

TEST_F(RdmaDevicesTest, NoDeviceSaysWhereToLook) {
  fake.hardware()->devices = 0;
  expect_refusal({"no RDMA device", "network namespace", "ibv_devices"});
}

TEST_F(RdmaDevicesTest, WithoutPermissionTheFileIsNamed) {
  for (int error : {EACCES, EPERM, ENOENT}) {
    fake.fail("ibv_open_device", error, 0);
    expect_refusal({"fake0: it does not open", system_message("", error), "/dev/infiniband/uverbs0",
                    "--device=/dev/infiniband"});
  }
}

TEST_F(RdmaDevicesTest, ADeviceThatFailsToOpenOtherwiseSaysWhy) {
  fake.fail("ibv_open_device", EIO, 0);
  const std::string text = refusal();
  expect_words(text, {"fake0: it does not open", "Input/output error"});
  EXPECT_EQ(text.find("/dev/infiniband"), std::string::npos) << text;
}

TEST_F(RdmaDevicesTest, AVerbThatFailsIsNamedAndNothingStaysOpen) {
  for (const char* verb : {"ibv_alloc_pd", "ibv_query_device", "ibv_query_port"}) {
    fake.reset();
    fake.fail(verb, ENOMEM, 0);
    expect_refusal({"fake0", verb, "Cannot allocate memory"});
    EXPECT_EQ(fake.alive(), 0) << verb;
  }
}

TEST_F(RdmaDevicesTest, EveryReasonIsTold) {
  fake.hardware()->devices = 2;
  fake.fail("ibv_alloc_pd", ENOMEM, 1);
  fake.hardware()->port_state = 1;
  expect_refusal({"fake0:1: its link is down; fake1: ibv_alloc_pd"});
}

TEST_F(RdmaDevicesTest, APortWhoseLinkIsDownIsNotUsed) {
  for (int state : {0, 1, 2, 3, 5}) {
    fake.hardware()->port_state = state;
    expect_refusal({"fake0:1: its link is down"});
  }
}

TEST_F(RdmaDevicesTest, IWarpIsNotUsed) {
  fake.hardware()->transport_type = 1;
  expect_refusal({"fake0: it is neither InfiniBand nor RoCE"});
}

TEST_F(RdmaDevicesTest, ADeviceThatFailsLeavesTheOthers) {
  fake.hardware()->devices = 3;
  fake.fail("ibv_open_device", EACCES, 2);
  const auto found = devices();
  ASSERT_EQ(found->ports().size(), 2U);
  EXPECT_EQ(found->ports()[1].device, "fake1");
}

TEST_F(RdmaDevicesTest, ThePatternChoosesAndAMissIsTold) {
  fake.hardware()->devices = 2;
  fake.hardware()->ports = 2;
  const auto found = devices({.hca = "=fake1:2"});
  ASSERT_EQ(found->ports().size(), 1U);
  EXPECT_EQ(found->ports()[0].device, "fake1");
  EXPECT_EQ(found->ports()[0].number, 2);
  EXPECT_EQ(fake.alive(), 2);  // the other device is closed
  expect_words(refusal({.hca = "mlx5_0"}), {"fake0:1: GRADWIRE_IB_HCA=mlx5_0 does not name it",
                                            "fake1:2: GRADWIRE_IB_HCA=mlx5_0 does not name it"});
}

TEST_F(RdmaDevicesTest, OfManyPortsTheFirstAreUsed) {
  fake.hardware()->devices = 4;
  fake.hardware()->ports = 5;
  const auto found = devices();
  ASSERT_EQ(found->ports().size(), kMostRdmaPorts);
  EXPECT_EQ(found->ports().back().describe().substr(0, 7), "fake3:1");
}

TEST_F(RdmaDevicesTest, TheLinkLayerChoosesAndAMissIsTold) {
  EXPECT_EQ(described({.link_layer = "ethernet"}).size(), 1U);
  expect_words(refusal({.link_layer = "infiniband"}),
               {"fake0:1: GRADWIRE_IB_LINK_LAYER=infiniband, and it is ethernet"});
  fake.hardware()->link_layer = ibv::kLinkInfiniBand;
  EXPECT_EQ(described({.link_layer = "infiniband"}).size(), 1U);
  expect_words(refusal({.link_layer = "ethernet"}),
               {"fake0:1: GRADWIRE_IB_LINK_LAYER=ethernet, and it is infiniband"});
}

// --- addresses ---

TEST_F(RdmaDevicesTest, AnIpv4AddressOfRoceV2IsTakenRather) {
  const auto found = devices();
  ASSERT_EQ(found->ports().size(), 1U);
  EXPECT_EQ(found->ports()[0].describe(), "fake0:1, RoCE v2, GID 2 (127.0.0.1), MTU 4096");
  EXPECT_EQ(found->ports()[0].address.network, "ethernet 127.0.0.0/8");
}

TEST_F(RdmaDevicesTest, WithoutIpv4TheLinkLocalOneServesAndTellsNoNetwork) {
  fake.hardware()->has_ipv4 = false;
  const auto found = devices();
  ASSERT_EQ(found->ports().size(), 1U);
  EXPECT_EQ(found->ports()[0].describe(), "fake0:1, RoCE v2, GID 1 (fe80::1), MTU 4096");
  EXPECT_EQ(found->ports()[0].address.network, "");
}

TEST_F(RdmaDevicesTest, WithoutRoceV2ThereIsNoAddress) {
  for (int readable : {0, 1}) {  // of these the first is of RoCE v1
    fake.reset();
    fake.fail("ibv_query_gid_ex", ENODATA, readable);
    expect_refusal({"fake0:1: it has no RoCE v2 address", "IPv4"});
  }
}

TEST_F(RdmaDevicesTest, AnIndexOfTheTableIsTakenAsItIs) {
  EXPECT_EQ(described({.gid_index = 0}), Texts{"fake0:1, RoCE v1, GID 0 (fe80::1), MTU 4096"});
  EXPECT_EQ(described({.gid_index = 1}), Texts{"fake0:1, RoCE v2, GID 1 (fe80::1), MTU 4096"});
  for (int index : {3, 7, 8, 255})  // the table has 8 entries, of which 5 are empty
    expect_words(
        refusal({.gid_index = index}),
        {"fake0:1: it has no GID of index GRADWIRE_IB_GID_INDEX=" + std::to_string(index)});
}

TEST_F(RdmaDevicesTest, InfiniBandIsReachedByItsLid) {
  fake.hardware()->link_layer = ibv::kLinkInfiniBand;
  fake.hardware()->active_mtu = ibv::kMtu2048;
  const auto found = devices();
  ASSERT_EQ(found->ports().size(), 1U);
  EXPECT_EQ(found->ports()[0].describe(), "fake0:1, InfiniBand, LID 7, MTU 2048");
  EXPECT_EQ(found->ports()[0].address.network, "infiniband fe80000000000000");
}

TEST_F(RdmaDevicesTest, TheMtuIsThePortsOrASmallerOneThatIsAskedFor) {
  fake.hardware()->active_mtu = ibv::kMtu1024;
  for (const auto& [asked, used] :
       std::vector<std::pair<int, std::string>>{{0, "1024"}, {256, "256"}, {4096, "1024"}})
    EXPECT_EQ(described({.mtu = asked}), Texts{"fake0:1, RoCE v2, GID 2 (127.0.0.1), MTU " + used});
}

std::string refusal_of(const std::string& variable, const std::string& value) {
  return thrown_by<InvalidArgument>([&] { read_rdma_settings({{variable, value}}); });
}

TEST(RdmaSettings, AValueOutOfRangeNamesItsVariable) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"GID_INDEX", "-1"}, {"GID_INDEX", "256"}, {"SL", "-1"},      {"SL", "16"},
      {"SL", "high"},      {"TIMEOUT", "0"},     {"TIMEOUT", "32"}, {"TIMEOUT", "1.5"},
      {"MTU", "1000"},     {"MTU", "-1"},        {"MTU", "8192"},   {"LINK_LAYER", "roce"}};
  for (const auto& [name, value] : wrong)
    expect_words(refusal_of("GRADWIRE_IB_" + name, value),
                 {"GRADWIRE_IB_" + name + "='" + value + "'", "use "});
  for (const char* value : {"-1", "256"})
    expect_words(refusal_of("GRADWIRE_TRAFFIC_CLASS", value), {"GRADWIRE_TRAFFIC_CLASS=", "use "});
}

TEST(RdmaSettings, AreThoseThatWereGiven) {
  const RdmaSettings none = read_rdma_settings({});
  EXPECT_EQ(none.hca + none.link_layer, "");
  EXPECT_EQ((std::array{none.gid_index, none.mtu, none.traffic_class, none.service_level}),
            (std::array{-1, 0, 0, 0}));
  EXPECT_EQ(none.timeout, 18);
  const RdmaSettings most = read_rdma_settings({{"GRADWIRE_IB_HCA", "=rxe0"},
                                                {"GRADWIRE_IB_LINK_LAYER", "infiniband"},
                                                {"GRADWIRE_IB_GID_INDEX", "255"},
                                                {"GRADWIRE_IB_MTU", "4096"},
                                                {"GRADWIRE_TRAFFIC_CLASS", "255"},
                                                {"GRADWIRE_IB_SL", "15"},
                                                {"GRADWIRE_IB_TIMEOUT", "31"}});
  EXPECT_EQ(most.hca + most.link_layer, "=rxe0infiniband");
  EXPECT_EQ((std::array{most.gid_index, most.mtu, most.traffic_class, most.service_level}),
            (std::array{255, 4096, 255, 15}));
  EXPECT_EQ(most.timeout, 31);
}

// As links ask for them: two ranks that may have no other transport trust all networks of one
// layer.
TEST_F(RdmaDevicesTest, NetworksSayWhoIsReached) {
  fake.hardware()->devices = 2;
  const auto found = devices();
  ASSERT_EQ(found->ports().size(), 2U);
  const std::string network = found->ports()[0].address.network;
  EXPECT_EQ(found->networks(false), (Texts{network, found->ports()[1].address.network}));
  EXPECT_EQ(found->networks(true),
            (Texts{network, "ethernet, any network", found->ports()[1].address.network,
                   "ethernet, any network"}));
  EXPECT_EQ(found->describe(), described());
}

// --- lockable memory ---

TEST_F(RdmaDevicesTest, ALowLimitIsTriedAndItsRemediesAreTold) {
  lockable = 8 << 20;
  fake.fail("ibv_reg_mr", ENOMEM, 0);
  expect_refusal({"Cannot allocate memory", "limit is 8 MiB", "64 MiB", "ulimit -l unlimited",
                  "LimitMEMLOCK=infinity", "--ulimit memlock=-1", "GRADWIRE_TRANSPORT=shm,tcp"});
}

TEST_F(RdmaDevicesTest, ALowLimitThatDoesNotApplyIsNone) {
  lockable = 64 << 10;
  const auto found = devices();
  EXPECT_EQ(fake.calls("ibv_reg_mr"), 1);
  EXPECT_EQ(fake.alive(), 2);  // the device and its domain: the trial was given back
}

TEST_F(RdmaDevicesTest, WhereTheLimitSufficesNothingIsTried) {
  for (rlim_t limit : {RLIM_INFINITY, rlim_t{64} << 20}) {
    lockable = limit;
    fake.fail("ibv_reg_mr", ENOMEM, 0);
    EXPECT_NO_THROW(devices());
  }
  EXPECT_EQ(fake.calls("ibv_reg_mr"), 0);
}

// --- a fork ---

TEST_F(RdmaDevicesTest, AForkTakesNothingAwayFromItsParent) {
  if (!kForkWorks) GTEST_SKIP() << "ThreadSanitizer";
  auto mine = devices();
  const int before = fake.alive();
  const pid_t child = ::fork();
  if (child == 0) {
    mine.reset();
    ::_exit(fake.alive() == before ? 0 : 1);  // of its copy: nothing was given back
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(mine->ports().size(), 1U);
}

TEST_F(RdmaDevicesTest, AForkForgetsItsLinks) {
  if (!kForkWorks) GTEST_SKIP() << "ThreadSanitizer";
  Couple pair = couple(of_rank(0, options()), of_rank(1, options()));
  send(*pair.ends[0], {1}, 100, 0);  // by value: without a completion
  const int alive = fake.alive(), writes = fake.calls("post_send");
  const pid_t child = ::fork();
  if (child == 0) {
    for (auto& end : pair.ends) end.reset();
    ::_exit(fake.alive() == alive && fake.calls("post_send") == writes ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  expect_message(*pair.ends[1], 0, 100, 0);
  send(*pair.ends[1], {0}, 100, 1);
  expect_message(*pair.ends[0], 1, 100, 1);
}

}  // namespace transport_rdma_devices_test
}  // namespace gradwire::transport
