"""Ranks far apart get several TCP streams, and the same sums."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosts
import namespaces
import numpy as np
import pytest
from gradwire import Communicator
from gradwire._host import streams
from hosts import Network

MISSING = namespaces.missing()
needs_hosts = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
USUAL = 3e6  # bytes in flight, by Linux's usual limits
_ESTABLISHED = "01"


@pytest.mark.parametrize(
    ("round_trip", "expected"),
    [(0.0, 1), (0.0001, 1), (0.0019, 1), (0.02, 2), (0.08, 5), (0.3, 8), (10.0, 8)],
)
def test_as_many_streams_as_the_round_trip_needs(round_trip: float, expected: int) -> None:
    assert streams.streams_for(round_trip, USUAL) == expected


def test_larger_windows_need_fewer_streams() -> None:
    assert streams.streams_for(0.08, 16e6) == 2


@pytest.mark.parametrize(("setting", "further"), [("1", 0), ("16", 15), ("auto", 0)])
def test_a_setting_counts_over_tcp_alone(
    monkeypatch: pytest.MonkeyPatch, setting: str, further: int
) -> None:
    monkeypatch.setenv("GRADWIRE_TCP_STREAMS", setting)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sock,
    ):
        assert streams.further_streams(sock, "tcp") == further
        assert streams.further_streams(sock, "rdma") == 0
        assert 0 < streams.round_trip(sock) < 1
    one, other = socket.socketpair()
    with one, other:
        assert streams.further_streams(one, "tcp") == 0
        assert streams.round_trip(one) == 0


def test_limits_of_a_stream_are_this_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e5 < streams.most_in_flight() < 1e10
    monkeypatch.setattr(Path, "read_text", lambda _: "broken")
    assert streams.most_in_flight() == 2e6


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(3)
    yield made
    made.close()


def connections_to(host: int) -> int:
    """How many TCP connections of this rank's host lead to another host, at a rank's port."""
    address = f"{host + 1:02X}004D0A"  # 10.77.0.x, as /proc has it
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ends = [line[2].split(":") for line in lines if line[3] == _ESTABLISHED]
    store = f"{hosts.PORT:04X}"
    return sum(where == address and port != store for where, port in ends)


@needs_hosts
@pytest.mark.parametrize("encryption", ["on", "off"])
@pytest.mark.parametrize("asked", [1, 3])
def test_sums_are_the_same_over_several_streams(
    network: Network, asked: int, encryption: str
) -> None:
    def body(comm: Communicator, pipe: Any) -> int:
        for algorithm in ("ring", "star", "direct"):
            for count in (1, 1000, 300_000):
                x = np.arange(count, dtype=np.float32) + comm.rank
                comm.all_reduce(x, algorithm=algorithm)
                assert (x == 3 * np.arange(count, dtype=np.float32) + 3).all()
        found = sum(connections_to(host) for host in range(3) if host != comm.rank)
        comm.barrier()
        with comm.split(comm.rank % 2) as part:
            assert part.all_reduce(np.ones(10))[0] == part.size
        return found

    setting = {"GRADWIRE_TCP_STREAMS": str(asked), "GRADWIRE_ENCRYPTION": encryption}
    with network.start(range(3), body, environment=lambda _: setting) as ranks:
        found = [rank.outcome() for rank in ranks]
    assert [each.error for each in found] == [None] * 3
    assert all(each.value >= 2 * (2 + asked) for each in found)
    assert all(each.value < 2 * (3 + asked) for each in found)


@needs_hosts
def test_a_cut_host_is_named_over_several_streams(network: Network) -> None:
    def body(comm: Communicator, pipe: Any) -> int:
        x = np.ones(4 << 20, np.float32)
        comm.all_reduce(x, algorithm="ring")
        pipe.send("under way")
        try:
            while True:
                comm.all_reduce(x, algorithm="ring")
        except hosts.gradwire.TransportError as error:
            return error.peer

    setting = {"GRADWIRE_TCP_STREAMS": "3", "GRADWIRE_TCP_TIMEOUT_SECONDS": "2"}
    with network.start(range(3), body, environment=lambda _: setting, timeout=60) as ranks:
        for rank in ranks:
            assert rank.pipe.poll(hosts.LIMIT)
            assert rank.pipe.recv() == "under way"
        with network.cut(2):
            found = [rank.outcome() for rank in ranks]
    assert [each.error for each in found] == [None] * 3
    assert [each.value for each in found[:2]] == [2, 2]
