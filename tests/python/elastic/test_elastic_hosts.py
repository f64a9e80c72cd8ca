"""A process of another host joins ranks that were all on one, where loopback had been enough.

The hosts are network namespaces (`hosts.py`).
"""

from __future__ import annotations

from typing import Any

import gradwire
import namespaces
import pytest
from elastic_job import SECRET, has, train
from gradwire import Communicator
from hosts import PORT, Network, Rank

MISSING = namespaces.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def test_a_process_of_another_host_joins() -> None:
    def body(comm: Communicator, _: Any = None) -> tuple[Any, ...]:
        comm, state = train(comm, has(3))
        with comm:
            return comm.hosts, str(comm._mesh.interface.interface), state

    def joiner(_: Any) -> Any:
        store = f"tcp://10.77.0.1:{PORT}"
        return body(gradwire.join(store=store, secret=SECRET, timeout=60))

    network = Network(2)
    try:
        with network.start((0, 0), body) as members:
            joining = Rank(network.hosts[1], joiner)
            ended = [each.outcome() for each in (*members, joining)]
            joining.close()
    finally:
        network.close()
    assert [each.error for each in ended] == [None] * 3, ended
    assert [each.value[0] for each in ended] == [((0, 1), (2,))] * 3
    assert [each.value[1] for each in ended] == [f"eth0 (10.77.0.{host})" for host in (1, 1, 2)]
    assert len({each.value[2] for each in ended}) == 1
