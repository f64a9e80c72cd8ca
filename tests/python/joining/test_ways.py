"""Two ranks use all pairs of interfaces by which they reach each other, and outlive one of them."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import hosts
import namespaces
import numpy as np
import pytest
from gradwire import Communicator, TransportError
from gradwire._host import interfaces
from gradwire._host.interfaces import Interface, further, ways_between
from gradwire._host.ways import TriedWays
from hosts import Network
from two_interfaces import (
    LIMIT,
    NAMED,
    apart,
    await_line,
    bytes_sent,
    log_lines,
    with_two_interfaces,
)

MISSING = namespaces.missing()
needs_hosts = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = with_two_interfaces(3)
    yield made
    made.close()


@needs_hosts
@pytest.mark.parametrize("encryption", ["on", pytest.param("off", marks=pytest.mark.nightly)])
def test_both_interfaces_carry_bytes_and_sums_are_right(network: Network, encryption: str) -> None:
    def body(comm: Communicator, pipe: Any) -> list[int]:
        before = [bytes_sent("eth0"), bytes_sent("eth1")]
        for algorithm in ("ring", "star", "direct"):
            for count in (1, 1000, 3_000_000):
                x = np.arange(count, dtype=np.float32) + comm.rank
                comm.all_reduce(x, algorithm=algorithm)
                assert (x == 3 * np.arange(count, dtype=np.float32) + 3).all()
        if comm.rank == 0:
            comm.send(np.arange(100_000), 2)
        elif comm.rank == 2:
            x = np.zeros(100_000, np.int64)
            comm.recv(x, 0)
            assert (x == np.arange(100_000)).all()
        with comm.split(comm.rank % 2) as part:
            assert part.all_reduce(np.ones(10))[0] == part.size
        return [
            now - then
            for now, then in zip([bytes_sent("eth0"), bytes_sent("eth1")], before, strict=True)
        ]

    setting = {**NAMED, "GRADWIRE_ENCRYPTION": encryption}
    for sent in network.values(range(3), body, environment=lambda _: setting):
        assert all(each > 1_000_000 for each in sent), sent


@needs_hosts
@pytest.mark.parametrize("pattern", ["=eth0", "^eth1"])
def test_one_interface_is_used_where_no_further_one_is_named(
    network: Network, pattern: str
) -> None:
    def body(comm: Communicator, pipe: Any) -> int:
        before = bytes_sent("eth1")
        comm.all_reduce(np.ones(1_000_000, np.float32))
        return bytes_sent("eth1") - before

    setting = {"GRADWIRE_SOCKET_IFNAME": pattern}
    assert network.values(range(2), body, environment=lambda _: setting) == [0, 0]


@needs_hosts
def test_an_interface_that_leads_nowhere_is_left_out(network: Network) -> None:
    def body(comm: Communicator, pipe: Any) -> float:
        x = np.ones(1000, np.float32)
        return float(comm.all_reduce(x)[0])

    with apart(network, "eth1", 1):
        found = network.values(range(2), body, environment=lambda _: NAMED)
    assert found == [2, 2]


@contextlib.contextmanager
def _down(network: Network, interface: str, host: int) -> Iterator[None]:
    """Meanwhile the interface is down on the host."""
    network.hosts[host].ip(f"link set {interface} down")
    yield
    network.hosts[host].ip(f"link set {interface} up")


def _train(comm: Communicator, pipe: Any) -> list[str]:
    """Sums until rank 0 is told to stop; tells each line of the log, and returns all of them."""
    lines = log_lines()
    x = np.empty(2_000_000, np.float32)  # enough for the second way to be used
    told, call = 0, 0
    while True:
        x[:] = np.arange(x.size) % 97 + comm.rank + call % 5
        x[-1] = comm.rank == 0 and pipe.poll()
        comm.all_reduce(x)
        expected = comm.size * (np.arange(x.size - 1) % 97 + call % 5) + sum(range(comm.size))
        assert (x[:-1] == expected).all(), call
        call += 1
        if call == 1:
            pipe.send("under way")
        for line in lines[told:]:
            pipe.send(line)
        told = len(lines)
        if x[-1]:
            return lines


@needs_hosts
@pytest.mark.parametrize(
    ("interface", "fail"),
    [
        pytest.param("eth0", apart, id="first", marks=pytest.mark.nightly),
        pytest.param("eth1", _down, id="further"),
    ],
)
def test_a_job_outlives_a_failed_interface_which_comes_back(
    network: Network, interface: str, fail: Callable[..., Any]
) -> None:
    with network.start(range(2), _train, environment=lambda _: NAMED, timeout=60) as ranks:
        for rank in ranks:
            await_line(rank, "under way")
        with fail(network, interface, 1):
            lines = [await_line(rank, "has failed") for rank in ranks]
        for peer, line in zip((1, 0), lines, strict=True):
            assert line.startswith("WARNING")
            assert interface in line
            assert f"to rank {peer}" in line
        for rank in ranks:
            assert interface in await_line(rank, "works again")
        ranks[0].pipe.send("stop")
        found = [rank.outcome() for rank in ranks]
    assert [each.error for each in found] == [None] * 2
    for each in found:
        assert sum("has failed" in line for line in each.value) == 1


@needs_hosts
@pytest.mark.nightly
def test_a_stopped_rank_is_no_failed_interface(network: Network) -> None:
    with network.start(range(2), _train, environment=lambda _: NAMED, timeout=60) as ranks:
        for rank in ranks:
            await_line(rank, "under way")
        os.kill(ranks[1].pid, signal.SIGSTOP)
        assert not ranks[0].pipe.poll(4 * float(LIMIT))  # no line of the log
        os.kill(ranks[1].pid, signal.SIGCONT)
        ranks[0].pipe.send("stop")
        found = [rank.outcome() for rank in ranks]
    assert [each.error for each in found] == [None] * 2
    assert [each.value for each in found] == [[], []]


@needs_hosts
def test_the_peer_is_lost_with_the_last_interface(network: Network) -> None:
    def body(comm: Communicator, pipe: Any) -> int:
        x = np.ones(1 << 20, np.float32)
        comm.all_reduce(x)
        pipe.send("under way")
        try:
            while True:
                comm.all_reduce(x)
        except TransportError as error:
            return error.peer

    with network.start(range(2), body, environment=lambda _: NAMED, timeout=60) as ranks:
        for rank in ranks:
            assert rank.pipe.poll(hosts.LIMIT)
            assert rank.pipe.recv() == "under way"
        with apart(network, "eth0", 1), apart(network, "eth1", 1):
            began = time.monotonic()
            found = [rank.outcome() for rank in ranks]
            took = time.monotonic() - began
    assert [each.error for each in found] == [None] * 2
    assert [each.value for each in found] == [1, 0]
    assert took < 3 * float(LIMIT) + max(each.queued for each in found)


@needs_hosts
def test_what_was_sent_at_the_end_comes_though_an_interface_has_just_failed(
    network: Network,
) -> None:
    def body(comm: Communicator, pipe: Any) -> int:
        comm.barrier()
        pipe.send("under way")
        pipe.recv()
        x = np.arange(1000)
        if comm.rank == 0:
            comm.send(x, 1)
            return 0  # and ends
        x[:] = 0
        comm.recv(x, 0)
        return int(x.sum())

    with network.start(range(2), body, environment=lambda _: NAMED, timeout=60) as ranks:
        for rank in ranks:
            assert rank.pipe.recv() == "under way"
        with apart(network, "eth0", 1):
            for rank in ranks:
                rank.pipe.send("go")
            found = [rank.outcome() for rank in ranks]
    assert [(each.error, each.value) for each in found] == [(None, 0), (None, 499500)]


def _port_of(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as sock:
        return int(sock.getsockname()[1])


@needs_hosts
@pytest.mark.nightly
def test_a_stream_that_is_swallowed_ends_in_an_error() -> None:
    """Over one way, as where one of several equal routes loses all packets."""

    def body(comm: Communicator, pipe: Any) -> int:
        x = np.ones(1 << 20, np.float32)
        comm.all_reduce(x)
        # Of control, collective and its further streams, p2p.
        ports = [_port_of(each.fd) for each in comm._mesh.tcp_sockets]
        pipe.send(ports[2])
        pipe.recv()
        try:
            while True:
                comm.all_reduce(x)
        except TransportError as error:
            return error.peer

    network = Network(2)
    with contextlib.closing(network):
        setting = {"GRADWIRE_TCP_STREAMS": "3", "GRADWIRE_TCP_TIMEOUT_SECONDS": LIMIT}
        with network.start(range(2), body, environment=lambda _: setting, timeout=60) as ranks:
            ports = [rank.pipe.recv() for rank in ranks]
            there = network.hosts[0]
            there.ip("link add sink type veth peer name drain", "link set sink up")
            there.command("tc", "qdisc", "add", "dev", "eth0", "ingress")
            rule = (
                "filter add dev eth0 parent ffff: protocol ip prio 1 u32 match ip protocol 6 0xff"
            )
            drop = f"match u16 {ports[1]} 0xffff at 20 action mirred egress redirect dev sink"
            there.command("tc", *rule.split(), *drop.split())
            began = time.monotonic()
            for rank in ranks:
                rank.pipe.send("go")
            found = [rank.outcome() for rank in ranks]
            took = time.monotonic() - began
    assert [each.error for each in found] == [None] * 2
    # Who notices first names the other, also to that one.
    assert [each.value for each in found] in ([1, 0], [0, 0], [1, 1])
    assert took < 3 * float(LIMIT) + 2 + max(each.queued for each in found)


ETH0, ETH1, WIFI = (
    Interface("eth0", "10.0.0.1"),
    Interface("eth1", "10.1.0.1"),
    Interface("wlan0", "10.2.0.1"),
)


def test_cards_as_fast_as_the_chosen_one_are_used_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_SOCKET_IFNAME", raising=False)
    speeds = {"eth0": 1000, "eth1": 1000, "eth2": 100, "wlan0": 0, "docker0": 0}
    monkeypatch.setattr(interfaces, "_speed", lambda name: speeds[name])
    slow, docker = Interface("eth2", "10.3.0.1"), Interface("docker0", "172.17.0.1")
    found = [ETH0, ETH1, WIFI, slow, docker, Interface("eth1", "10.1.0.9")]
    monkeypatch.setattr(interfaces, "interfaces", lambda: found)
    assert further(ETH0) == [ETH1]
    assert further(WIFI) == []
    assert further(Interface("lo", "127.0.0.1")) == []
    monkeypatch.setenv("GRADWIRE_SOCKET_IFNAME", "eth0,eth2,wlan")
    assert further(ETH0) == [slow, WIFI]
    monkeypatch.setenv("GRADWIRE_SOCKET_IFNAME", "^eth1")
    assert further(ETH0) == []


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        ([ETH0, ETH1], ["10.0.0.2", "10.1.0.2"], [(ETH1, "10.1.0.2")]),
        ([ETH0], ["10.0.0.2", "10.0.0.3"], [(ETH0, "10.0.0.3")]),
        ([ETH0, ETH1], ["10.0.0.2"], [(ETH1, "10.0.0.2")]),
        ([ETH0, ETH1], ["10.0.0.2", "10.0.0.3"], [(ETH1, "10.0.0.3")]),
        ([ETH0, ETH1], ["10.0.0.2", "10.9.0.2"], [(ETH1, "10.0.0.2")]),
        ([ETH0], ["10.0.0.2"], []),
    ],
)
def test_each_interface_has_a_pair_by_the_routing_table(
    monkeypatch: pytest.MonkeyPatch,
    own: list[Interface],
    theirs: list[str],
    expected: list[tuple[Interface, str]],
) -> None:
    def source(address: str, port: int) -> str:
        if address.startswith("10.9."):
            return "192.168.0.1"  # an interface that is not used
        return address.rpartition(".")[0] + ".1"

    monkeypatch.setattr(interfaces, "address_towards", source)
    found = ways_between(own, [(each, 7) for each in theirs])
    if theirs[-1] == "10.9.0.2":
        expected = [(ETH1, "10.9.0.2")]  # perhaps; it remains to be tried
    assert found == [(interface, (address, 7)) for interface, address in expected]


def test_an_interface_that_led_to_none_of_two_hosts_is_tried_with_no_third() -> None:
    tried = TriedWays()
    assert not tried.lead_nowhere("eth1", "a", "10.0.1.1")
    tried.failed("eth1", "a", "10.0.1.1")
    assert tried.lead_nowhere("eth1", "a", "10.0.1.1")
    assert not tried.lead_nowhere("eth1", "b", "10.0.1.2")
    tried.failed("eth1", "b", "10.0.1.2")
    assert tried.lead_nowhere("eth1", "c", "10.0.1.3")
    assert not tried.lead_nowhere("eth0", "c", "10.0.1.3")
    tried.worked("eth1")
    assert not tried.lead_nowhere("eth1", "c", "10.0.1.3")
