// On a real RDMA device (`make test-with WHAT=rdma` boots a machine with one), as other transports.
#include "transport_conformance.h"

namespace gradwire::transport {
namespace {

std::vector<const char*> where_there_is_a_device() {
  return open_transport("rdma", {}).usable() ? std::vector<const char*>{"rdma"}
                                             : std::vector<const char*>{};
}

}  // namespace

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransportConformance);
INSTANTIATE_TEST_SUITE_P(Rdma, TransportConformance, testing::ValuesIn(where_there_is_a_device()));

TEST(Rdma, IsTestedWhereThereIsADevice) {
  if (const OpenedTransport rdma = open_transport("rdma", {}); !rdma.usable())
    GTEST_SKIP() << rdma.why_not;
  for (const RdmaPort& port : rdma_devices()->ports()) std::printf("%s\n", port.describe().c_str());
}

}  // namespace gradwire::transport
