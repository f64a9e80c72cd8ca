"""Ranks that only connect, and packet filters: pairs that turn round, and pairs that are relayed.

One inbound TCP port leads to host 0, and none to the other hosts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradwire
import namespaces
import numpy as np
import pytest
from gradwire import Communicator, TransportError
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import connect, endpoints, relay
from gradwire._bootstrap.authenticator import hand_to_listener, open_listener
from gradwire._bootstrap.handshake import HELLO_BYTES, WELCOME_BYTES, Hello, Purpose, receive
from gradwire._bootstrap.mesh import (
    AddressInfo,
    Job,
    RelayPlace,
    choose_relay,
    unpack_address_info,
)
from hosts import LIMIT, PORT, Network, Rank
from namespaces import Namespace
from stopwatch import own_time

from bench.network import relayed

MISSING = namespaces.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

STORE = f"tcp://10.77.0.1:{PORT}"
ESTABLISHED = "01"  # the state in /proc/net/tcp
PATTERN = b"gradients in the clear"
NOTICED = 5.0  # seconds in which a lost rank is named


@pytest.fixture(scope="module")
def open_network() -> Iterator[Network]:
    made = Network(4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """With the filters."""
    made = Network(4)
    made.let_in(0, PORT)
    for host in (1, 2, 3):
        made.let_in(host)
    yield made
    made.close()


def declared(rank: int) -> dict[str, str]:
    """The hosts say what the filters do."""
    return {"GRADWIRE_ADVERTISE": "none"} if rank else {"GRADWIRE_PORT": str(PORT)}


def undeclared(rank: int) -> dict[str, str]:
    return {} if rank else {"GRADWIRE_PORT": str(PORT)}


def named(rank: int) -> dict[str, str]:
    """The relay has a name, as where a rank's host other than the first is to relay."""
    return {**declared(rank), "GRADWIRE_RELAY": f"10.77.0.1:{PORT}"}


def peers() -> set[str]:
    """The addresses that this host has TCP connections with."""
    rows = Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]
    fields = [row.split() for row in rows]
    theirs = [each[2].partition(":")[0] for each in fields if each[3] == ESTABLISHED]
    return {socket.inet_ntoa(bytes.fromhex(each)[::-1]) for each in theirs}


def sum_of_ranks(comm: Communicator) -> float:
    return float(comm.all_reduce(np.full(3, comm.rank + 1, np.float32))[0])


def go_on_without_end(comm: Communicator) -> None:
    while True:
        comm.all_reduce(np.ones(1000, np.float32))


# ---- Pairs of which one side can listen ---------------------------------------------------------


@pytest.mark.parametrize("places", [(0, 1), (1, 0), (1, 0, 2)])
def test_a_rank_that_only_connects_is_reached_by_nobody(
    open_network: Network, places: Sequence[int]
) -> None:
    """Host 1's ranks connect, be they the lower or the higher ones of a pair."""

    def environment(rank: int) -> dict[str, str]:
        return {"GRADWIRE_ADVERTISE": "none"} if places[rank] == 1 else {}

    listening: list[int] = []
    honest = connect.listen

    def listen(*what: Any) -> Any:
        found = honest(*what)
        listening.append(found[1].port)
        return found

    def body(comm: Communicator, _: Any) -> tuple[float, list[int]]:
        return sum_of_ranks(comm), listening

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connect, "listen", listen)
        store = f"tcp://10.77.0.{places[0] + 1}:{PORT}"
        found = open_network.values(places, body, store=store, environment=environment)
    total = sum(range(1, len(places) + 1))
    assert [value for value, _ in found] == [total] * len(places)
    assert [ports == [0] for _, ports in found] == [place == 1 for place in places]


def test_a_pair_turns_round_where_only_the_lower_rank_gets_through() -> None:
    """Nobody connects to host 0, which has the lower rank, but to the store."""
    with contextlib.closing(Network(2)) as network:
        network.let_in(0, PORT)
        found = network.values((0, 1), lambda comm, _: sum_of_ranks(comm), store=STORE)
    assert found == [3.0] * 2


# ---- Pairs that are relayed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment", [declared, named, pytest.param(undeclared, marks=pytest.mark.nightly)]
)
def test_one_inbound_port_suffices_for_ranks_behind_filters(
    network: Network, environment: Any
) -> None:
    def body(comm: Communicator, _: Any) -> tuple[float, float, set[str]]:
        group = comm.split(0 if comm.rank in (1, 2) else 1)
        assert group is not None
        return sum_of_ranks(comm), sum_of_ranks(group), peers()

    how = {"store": STORE, "environment": environment}
    found = network.values((0, 1, 2), body, **how)
    assert [value for value, *_ in found] == [6.0] * 3
    assert [value for _, value, _ in found] == [1.0, 3.0, 3.0]
    assert [addresses for *_, addresses in found] == [
        {"10.77.0.2", "10.77.0.3"},
        {"10.77.0.1"},
        {"10.77.0.1"},
    ]


def test_the_relay_reads_nothing(network: Network) -> None:
    """What it passes on has no trace of what ranks send, nor of the job's secret."""
    passed: list[bytes] = []

    def pump(source: socket.socket, target: socket.socket, _: int = 0) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                passed.append(part)
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)

    def body(comm: Communicator, _: Any) -> tuple[int, bool]:
        array = np.frombuffer(PATTERN * 1000, np.uint8).copy()
        if comm.rank == 1:
            comm.send(array, 2)
        elif comm.rank == 2:
            comm.recv(array, 1)
            assert array.tobytes() == PATTERN * 1000
        comm.barrier()
        text = b"".join(passed)
        return len(text), any(each in text for each in (PATTERN, b"0123456789abcdef"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "_pump", pump)
        found = network.values((0, 1, 2), body, store=STORE, environment=declared)
    assert found[0][0] > len(PATTERN) * 1000
    assert [traces for _, traces in found] == [False] * 3


def test_a_killed_rank_is_named_through_the_relay_and_the_others_go_on(network: Network) -> None:
    def body(comm: Communicator, pipe: Any) -> tuple[int, float, float]:
        comm.barrier()
        pipe.send("ready")
        if comm.rank == 1:
            signal.pause()
        began = own_time()
        with pytest.raises(TransportError) as raised:
            go_on_without_end(comm)
        seconds = own_time() - began
        with comm.shrink() as rest:
            return raised.value.peer, seconds, sum_of_ranks(rest)

    places = (0, 1, 2, 3)
    with network.start(places, body, store=STORE, environment=declared) as ranks:
        assert [rank.pipe.recv() for rank in ranks] == ["ready"] * 4
        os.kill(ranks[1].pid, signal.SIGKILL)
        ended = [ranks[each].outcome() for each in (0, 2, 3)]
    assert [each.error for each in ended] == [None] * 3
    assert [each.value[0] for each in ended] == [1] * 3
    assert max(each.value[1] for each in ended) < NOTICED
    assert [each.value[2] for each in ended] == [6.0] * 3


def test_a_process_behind_a_filter_joins_one_behind_another(network: Network) -> None:
    def joiner(pipe: Any) -> float:
        os.environ.update({"GRADWIRE_SECRET": "0123456789abcdef", **declared(2)})
        with gradwire.join(store=STORE, timeout=LIMIT) as comm:
            return sum_of_ranks(comm)

    def body(comm: Communicator, pipe: Any) -> float:
        comm.accept_joins()
        comm.barrier()
        pipe.send("ready")
        while not comm.should_resize():
            comm.barrier()
        with comm.resize() as grown:
            return sum_of_ranks(grown)

    with network.start((0, 1), body, store=STORE, environment=declared) as ranks:
        assert [rank.pipe.recv() for rank in ranks] == ["ready"] * 2
        with contextlib.closing(Rank(network.hosts[2], joiner)) as third:
            ended = [each.outcome() for each in (*ranks, third)]
    assert [(each.value, each.error) for each in ended] == [(6.0, None)] * 3


def test_a_relay_ends_with_its_job_and_the_last_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_TURN_SECONDS", 0.01)
    job, pair_ends = Job("job", b"0123456789abcdef", os.getpid()), threading.Event()
    number = relay.number_of_relay(job)
    relay.serve(job)
    relay.serve(job)
    mine = relay._relays[number]
    assert not mine._has_ended()
    mine._threads.add(relay._start(pair_ends.wait))
    del job
    assert not mine._has_ended()
    pair_ends.set()
    limit = Deadline(LIMIT)
    while number in relay._relays and not limit.passed:
        threading.Event().wait(0.01)
    with relay._lock:  # it has closed its listener, too
        open_listener(number, 0).close()  # the name is free


def test_all_ranks_choose_the_same_relay_of_those_that_some_know() -> None:
    rank = AddressInfo("h0", "", ("tcp",), "", "10.0.0.1", 1)
    former, another = (RelayPlace(host, "", "10.0.0.9", 80) for host in ("h8", "h9"))
    a_user_s = RelayPlace("", "relay.example", "", 443)
    member = replace(rank, relays=True, relay=RelayPlace("h0", "", "10.0.0.1", 80))
    one, other = replace(rank, relay=former), replace(rank, relay=another)
    named = replace(rank, relay=a_user_s)
    assert choose_relay([rank, rank]) is None
    assert choose_relay([rank, other, one]) == another
    assert choose_relay([other, one, member]) == member.relay
    assert choose_relay([other, member, named]) == a_user_s
    assert unpack_address_info(named.pack(), 1) == named


def test_a_name_of_which_one_address_drops_packets_takes_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[float] = []

    def dial(family: int, target: Any, seconds: float) -> socket.socket:
        tried.append(seconds)
        if len(tried) < 3:
            raise TimeoutError
        return socket.socket()

    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{n}", 80)) for n in range(3)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(endpoints, "dial", dial)
    endpoints.dial_by_name("relay.example", 80, 6.0).close()
    assert tried == pytest.approx([2.0, 3.0, 6.0], abs=0.5)  # of a clock that stands still
    del tried[:]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
    with pytest.raises(OSError, match=r"no answer in 6 s") as raised:
        endpoints.dial_by_name("relay.example", 80, 6.0)
    assert raised.value.errno == errno.ETIMEDOUT


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run as another user")
def test_another_users_process_takes_no_place_at_the_relay() -> None:
    with open_listener(7, 0) as waits, contextlib.ExitStack() as stack:
        name, pipe = waits.getsockname(), os.pipe()
        child = os.fork()
        if child == 0:
            os.setresuid(65534, 65534, 65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(name)
                os.write(pipe[1], b"x")
                os._exit(0)
        assert os.read(pipe[0], 1) == b"x"
        os.waitpid(child, 0)
        for each in pipe:
            os.close(each)
        mine, sent = (stack.enter_context(each) for each in ends_of_a_connection())
        assert hand_to_listener(sent, Hello("job", Purpose.RELAY, listener=7).pack(), 0)
        sent.close()
        with relay._second(waits) as found:
            assert found.getpeername() == mine.getsockname()


def ends_of_a_connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@pytest.mark.parametrize("said", [0, WELCOME_BYTES - 1])
def test_a_stranger_whom_the_rank_refuses_costs_the_relay_nothing_more(said: int) -> None:
    """He says nothing, and never ends his socket."""
    stranger, sock = ends_of_a_connection()
    rank, other = ends_of_a_connection()
    hello = Hello("job", Purpose.CONTROL).pack()
    thread = threading.Thread(target=relay.pass_on, args=(sock, other, hello), daemon=True)
    with stranger, sock, other:
        thread.start()
        with rank:
            assert receive(rank, HELLO_BYTES, Deadline(LIMIT)) == hello
            rank.sendall(bytes(said))
        thread.join(LIMIT)
        assert not thread.is_alive()
        assert receive(stranger, said, Deadline(LIMIT)) == bytes(said)
        assert stranger.recv(1) == b""


def test_the_relay_waits_on_descriptors_of_any_number() -> None:
    one, other = socket.socketpair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        number = fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 1500)
        with one, other, socket.socket(fileno=number) as high:
            other.sendall(b"x")
            assert relay._ready(high, one) == [high, one]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.nightly
def test_a_relayed_pair_fills_its_share_of_the_relays_link() -> None:
    """What one sends to the other goes in and out at host 0, as does what comes back.

    On a quiet machine it has more than 0.9 of it (docs/benchmarks.md).
    """
    mbit = 200
    with relayed.relay_and_two_hosts(mbit) as network:
        rates = relayed.all_reduces(network, size=16 << 20, turns=5)
    assert statistics.median(rates) > 0.85 * mbit / 2, rates


def test_an_abort_gets_through_the_relay(network: Network) -> None:
    def abort(comm: Communicator) -> None:
        comm.barrier()  # which rank 2 may leave first
        if comm.rank == 2:
            comm.abort("enough")
        go_on_without_end(comm)

    def body(comm: Communicator, _: Any) -> str:
        with pytest.raises(gradwire.Error) as raised:
            abort(comm)
        return str(raised.value)

    found = network.values((0, 1, 2), body, store=STORE, environment=declared)
    assert all("enough" in each for each in found), found


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nft", path=namespaces.PATH) is None, reason="no nft command")
@pytest.mark.parametrize("environment", [declared, undeclared])
def test_two_hosts_of_one_address_behind_two_routers_meet(environment: Any) -> None:
    """Their routers translate addresses, as those of two homes do."""
    with contextlib.closing(Network(3)) as network, contextlib.ExitStack() as stack:
        network.let_in(0, PORT)
        for router in network.hosts[1:]:
            inside = Namespace()
            stack.callback(inside.close)
            router.ip(
                f"link add lan type veth peer name eth0 netns {inside.path}",
                "addr add 192.168.1.1/24 dev lan",
                "link set lan up",
            )
            inside.ip(
                "addr add 192.168.1.2/24 dev eth0",
                "link set eth0 up",
                "route add default via 192.168.1.1",
            )
            router.run(lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
            chain = "type nat hook postrouting priority 100;"
            rules = f'table ip nat {{\nchain out {{\n{chain}\noifname "eth0" masquerade\n}}\n}}\n'
            router.command("nft", "-f", "-", text=rules)
            network.hosts.append(inside)
        how = {"store": STORE, "environment": environment}
        found = network.values((0, 3, 4), lambda comm, _: sum_of_ranks(comm), **how)
    assert found == [6.0] * 3
