"""Two hosts with a long link between them: bench/network/long_link.cc carries their packets."""

import os

import namespaces
import pytest

from bench.network import long_link

WHY = namespaces.missing()
if WHY is None and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
    WHY = "no /dev/net/tun"
if WHY is None and not long_link.PROGRAM.exists():
    WHY = f"no {long_link.PROGRAM}: `make test-cpp` builds it"
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))


@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_sums_are_right_over_a_long_link_that_loses_packets(loss: float) -> None:
    with long_link.long_link(1000, 40, loss) as sites:
        rates = long_link.all_reduces(sites, "auto", 4 << 20, 1)
    assert len(rates) == 1


def test_plain_streams_are_measured_over_the_same_link() -> None:
    with long_link.long_link(100, 4, 0.0) as sites:
        (rate,) = long_link.plain(sites, 2, 1 << 20, 1)
    assert 0 < rate <= 110
