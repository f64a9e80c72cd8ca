"""Ranks on several hosts with several interfaces: which they choose, what they say and compute.

The hosts are network namespaces (`hosts.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import namespaces
import numpy as np
import pytest
import ranks
from gradwire import Communicator, RendezvousError
from gradwire._bootstrap import endpoints
from gradwire._host.interfaces import interfaces
from gradwire._tools import doctor
from hosts import PORT, Network, Rank, debians_etc_hosts
from stopwatch import own_time

MISSING = namespaces.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

PLACES = (0, 0, 1, 1, 2, 2, 3, 3)
GROUPS = ((0, 1), (2, 3), (4, 5), (6, 7))
SOON = 10.0  # seconds; the ranks' own deadline is 30


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(4, decoys=True)
    yield made
    made.close()


def ifname(pattern: str) -> dict[str, Any]:
    return {"environment": lambda rank: {"GRADWIRE_SOCKET_IFNAME": pattern}}


def interface_of(comm: Communicator, _: Any) -> str:
    comm.barrier()
    return str(comm._mesh.interface)


def sum_of_ranks(comm: Communicator, _: Any) -> float:
    return float(comm.all_reduce(np.full(3, comm.rank, np.float32))[0])


def errors_of(network: Network, places: tuple[int, ...], **how: Any) -> list[str]:
    """The errors of ranks that could not meet; they come soon."""
    began = own_time()
    ended = network.outcomes(places, interface_of, **how)
    assert own_time() - began - sum(each.queued for each in ended) < SOON
    assert all(isinstance(each.error, RendezvousError) for each in ended), ended
    return [str(each.error) for each in ended]


# Which interface


@pytest.mark.parametrize("subnet", ["10.77.0.{}", "fd77::{}"], ids=["IPv4", "IPv6"])
def test_four_hosts_meet_at_the_addresses_that_reach_the_store(
    network: Network, subnet: str
) -> None:
    def body(comm: Communicator, _: Any) -> tuple[object, ...]:
        return comm.transports, comm.hosts, interface_of(comm, _)

    first = subnet.format(1)
    store = f"tcp://[{first}]:{PORT}" if ":" in first else f"tcp://{first}:{PORT}"
    for rank, (links, groups, interface) in enumerate(network.values(PLACES, body, store=store)):
        peers = [peer for peer in range(8) if peer != rank]
        assert links == {peer: "shm" if peer // 2 == rank // 2 else "tcp" for peer in peers}
        assert groups == GROUPS
        assert interface == f"eth0 ({subnet.format(rank // 2 + 1)}): it reaches the store"


@pytest.mark.parametrize("pattern", ["eth", "=eth0", "^docker,dead,lo,container,inside"])
def test_a_pattern_chooses_the_interface(network: Network, pattern: str) -> None:
    found = network.values((0, 1), interface_of, **ifname(pattern))
    reason = f"GRADWIRE_SOCKET_IFNAME={pattern}"
    assert found == [f"eth0 (10.77.0.1): {reason}", f"eth0 (10.77.0.2): {reason}"]


def test_a_pattern_may_differ_from_host_to_host(network: Network) -> None:
    def environment(rank: int) -> dict[str, str]:
        return {} if rank else {"GRADWIRE_SOCKET_IFNAME": "=eth0"}

    found = network.values((0, 1), interface_of, environment=environment)
    assert [each.split(":")[0] for each in found] == ["eth0 (10.77.0.1)", "eth0 (10.77.0.2)"]


def test_the_address_of_a_bridge_that_all_hosts_have_is_refused(network: Network) -> None:
    for error in errors_of(network, (0, 0, 1, 1), **ifname("docker")):
        assert "docker0 172.17.0.1" in error
        assert "both hosts have this address" in error
        assert "set GRADWIRE_SOCKET_IFNAME" in error


def test_interfaces_that_share_no_network_are_an_error_on_all_ranks(network: Network) -> None:
    for error in errors_of(network, (0, 1, 1), **ifname("dead0")):
        assert "dead0 10.99.0.2 port" in error
        assert "could not connect to rank 0" in error
        assert "dead0 10.99.0.1 port" in error
        assert "set GRADWIRE_SOCKET_IFNAME on both hosts" in error


def test_packets_that_vanish_are_an_error_on_all_ranks_too(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packets vanish at a firewall that drops them silently."""
    monkeypatch.setattr(endpoints, "CONNECT_SECONDS", 1.0)
    nowhere = "10.99.0.1 lladdr 02:00:00:00:00:07 dev dead0"
    network.hosts[1].ip(f"neigh replace {nowhere} nud permanent")
    try:
        errors = errors_of(network, (0, 0, 1), **ifname("dead0"))
    finally:
        network.hosts[1].ip("neigh del 10.99.0.1 dev dead0")
    for error in errors:
        assert "could not connect to rank 0" in error
        assert "no answer in 1 s" in error
        assert "a firewall is in between" in error


def test_loopback_is_refused_where_there_are_several_hosts(network: Network) -> None:
    for error in errors_of(network, (0, 0, 1), **ifname("lo")):
        assert "selects only loopback, though some ranks are on other hosts" in error
        assert "dead0, docker0, eth0" in error


def test_all_ranks_hear_of_the_one_whose_pattern_selects_nothing(network: Network) -> None:
    def environment(rank: int) -> dict[str, str]:
        return {"GRADWIRE_SOCKET_IFNAME": "wlan"} if rank == 2 else {}

    errors = errors_of(network, (0, 0, 1, 1), environment=environment)
    assert errors[2].startswith("GRADWIRE_SOCKET_IFNAME='wlan' selects nothing")
    for rank in (0, 1, 3):
        assert "rank 2 (" in errors[rank]
        assert "GRADWIRE_SOCKET_IFNAME='wlan' selects nothing" in errors[rank]


def test_ranks_of_one_host_stay_on_loopback_though_the_store_is_beyond(network: Network) -> None:
    found = network.values((0, 0), interface_of)
    assert found == ["lo (127.0.0.1): all ranks are on this host"] * 2


def test_a_store_whose_name_means_loopback_on_its_own_host(
    network: Network, tmp_path: Path
) -> None:
    found = network.values(
        (0, 0, 1, 1),
        interface_of,
        store=f"tcp://node0:{PORT}",
        etc_hosts=debians_etc_hosts(tmp_path),
        environment=lambda rank: {"GRADWIRE_SOCKET_IFNAME": "=eth0"} if rank == 0 else {},
    )
    assert found[0] == "eth0 (10.77.0.1): GRADWIRE_SOCKET_IFNAME==eth0"
    assert found[1].startswith("eth0 (10.77.0.1): other hosts reach the store")
    assert found[2:] == ["eth0 (10.77.0.2): it reaches the store"] * 2


@pytest.mark.parametrize("addresses", ["fd77::{}/64", "fe80::{}/64"], ids=["global", "link-local"])
def test_hosts_with_ipv6_alone(addresses: str) -> None:
    first = addresses.split("/")[0].format(1)
    scope = "%eth0" if first.startswith("fe80") else ""
    made = Network(2, addresses=[addresses])
    try:
        found = made.values((0, 1), interface_of, store=f"tcp://[{first}{scope}]:{PORT}")
        second = first.replace("::1", "::2")
        reason = "it reaches the store"
        assert found == [f"eth0 ({first}): {reason}", f"eth0 ({second}): {reason}"]
    finally:
        made.close()


def test_ranks_that_mpirun_starts_on_two_hosts_need_a_store(network: Network) -> None:
    def place(rank: int, **more: str) -> dict[str, str]:
        names = ("COMM_WORLD_RANK", "COMM_WORLD_SIZE", "COMM_WORLD_LOCAL_SIZE")
        values = zip(names, (rank, 4, 2), strict=True)
        return {**{f"OMPI_{name}": str(value) for name, value in values}, **more}

    for error in errors_of(network, (0, 0, 1, 1), store=None, environment=place):
        assert "set GRADWIRE_STORE=tcp://HOST:PORT" in error
    store = f"tcp://10.77.0.1:{PORT}"
    found = network.values(
        (0, 0, 1, 1),
        sum_of_ranks,
        store=None,
        environment=lambda rank: place(rank, GRADWIRE_STORE=store, GRADWIRE_JOB="mine"),
    )
    assert found == [6.0] * 4


def test_all_addresses_of_connected_interfaces_are_found() -> None:
    made = Network(1, addresses=["10.77.0.1/24", "10.77.0.9/24", "fd77::1/64"])
    try:
        host = made.hosts[0]
        host.ip(
            "addr add 10.77.5.1/24 dev eth0 label eth0:5",
            "link add idle0 type veth peer name idle1",  # idle1 stays down: no carrier
            "addr add 10.78.0.1/24 dev idle0",
            "link set idle0 up",
        )
        host.await_states("idle0", "idle1")
        with contextlib.closing(Rank(host, lambda pipe: interfaces())) as rank:
            found = rank.outcome().value
        of_eth0 = {each.address for each in found if each.name == "eth0"}
        assert of_eth0 == {"10.77.0.1", "10.77.0.9", "10.77.5.1", "fd77::1"}
        assert {each.name for each in found} == {"lo", "eth0"}
    finally:
        made.close()


def test_the_doctor_says_which_interface_and_why(network: Network) -> None:
    def chosen(pattern: str) -> str:
        os.environ["GRADWIRE_STORE"] = f"tcp://10.77.0.1:{PORT}"
        os.environ["GRADWIRE_SOCKET_IFNAME"] = pattern
        (found,) = [each for each in doctor.checks() if each.name == "ranks on several hosts"]
        return found.detail

    def on_host_1(pattern: str) -> str:
        with contextlib.closing(Rank(network.hosts[1], lambda _: chosen(pattern))) as rank:
            return str(rank.outcome().value)

    assert on_host_1("") == "use eth0 (10.77.0.2): it reaches the store"
    assert on_host_1("dead") == "use dead0 (10.99.0.2): GRADWIRE_SOCKET_IFNAME=dead"
    assert "selects nothing; the interfaces that are up: " in on_host_1("wlan")


# What they compute

HIERARCHICAL = [
    f"hierarchical({parts})"
    for parts in ("ring,ring", "direct,halving_doubling", "star,double_binary_tree", "ring,star")
]


def reductions(comm: Communicator, _: Any = None) -> dict[str, tuple[str, float]]:
    """A digest of the result's bits and its largest error, for each algorithm and codec."""
    count = 60_011
    inputs = [
        np.random.default_rng(rank).standard_normal(count, np.float32) for rank in range(comm.size)
    ]
    exact = np.sum(np.stack(inputs), axis=0, dtype=np.float64)
    found = {}
    for algorithm in [*gradwire.algorithms(), *HIERARCHICAL]:
        for codec in ("none", "fp16"):
            if (algorithm, codec) == ("recursive_doubling", "fp16"):  # not in-tree
                continue
            x = inputs[comm.rank].copy()
            comm.all_reduce(x, algorithm=algorithm, codec=codec)
            digest = hashlib.sha256(x.tobytes()).hexdigest()
            found[f"{algorithm} {codec}"] = digest, float(np.abs(x - exact).max())
    return found


def test_all_algorithms_give_right_results_with_the_same_bits(network: Network) -> None:
    found = network.values(PLACES, reductions)
    assert all(each == found[0] for each in found)
    for name, (_, error) in found[0].items():
        assert error < (1e-5 if name.endswith("none") else 0.1), name
    within_a_process = ranks.run(8, reductions, hosts=GROUPS)
    assert found[0] == within_a_process[0]


def test_messages_and_new_communicators_cross_hosts(network: Network) -> None:
    def body(comm: Communicator, _: Any) -> tuple[list[float], object, str]:
        x = np.full(100_000, comm.rank, np.float32)
        received = np.empty_like(x)
        sent = comm.send(x, (comm.rank + 3) % comm.size, async_op=True)
        comm.recv(received, (comm.rank - 3) % comm.size)
        sent.wait()
        # The order is reversed, so the ranks that accepted before connect now.
        half = comm.split(comm.rank % 2, -comm.rank)
        assert half is not None
        with half:
            total = half.all_reduce(np.full(3, comm.rank, np.float32), algorithm="ring")
        return [received[0], received[-1], total[0]], half.transports, str(half._mesh.interface)

    for rank, (numbers, links, interface) in enumerate(network.values(PLACES, body)):
        assert numbers == [(rank - 3) % 8, (rank - 3) % 8, 12.0 + 4 * (rank % 2)]
        assert set(links.values()) == {"tcp"}
        assert interface.startswith(f"eth0 (10.77.0.{rank // 2 + 1})")
