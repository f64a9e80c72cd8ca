#include "transport_conformance.h"

namespace gradwire::transport {
INSTANTIATE_TEST_SUITE_P(Tcp, TransportConformance, testing::Values("tcp"));
}
