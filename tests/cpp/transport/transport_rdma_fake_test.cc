// The conformance suite over a libibverbs of this process.
#include "fake_ibverbs.h"
#include "transport_conformance.h"

namespace gradwire::transport {
namespace transport_rdma_fake_test {

const bool faked = [] {
  rdma_library = GRADWIRE_FAKE_IBVERBS;
  fake_ibverbs().reset();
  return true;
}();

}  // namespace transport_rdma_fake_test

INSTANTIATE_TEST_SUITE_P(FakeRdma, TransportConformance, testing::Values("rdma"));

}  // namespace gradwire::transport
