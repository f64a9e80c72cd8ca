"""A rank that is killed while the ranks meet: all others say which it was, at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import gradwire
import pytest
from agent import agents_store
from gradwire._bootstrap import advertised_store, rendezvous
from gradwire._bootstrap import connect as _connect
from gradwire._bootstrap import rendezvous_exchange as _exchange
from gradwire._bootstrap.launch_info import LaunchInfo
from gradwire._bootstrap.mesh import Mesh
from gradwire._bootstrap.through_torch.open_exchange import Question
from gradwire._communicator import from_mesh
from hosts import Rank
from ranks import over_processes
from stopwatch import own_time

P = 4
SOON = 2.0  # seconds


def die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def before_it_sends_its_address() -> None:
    _exchange.RendezvousExchange.exchange_addresses = die  # type: ignore[method-assign]


def with_its_address_published() -> None:
    honest = _exchange.RendezvousExchange._get

    def get(self: Any, what: str, *rest: Any) -> bytes:
        return die() if what == "address" else honest(self, what, *rest)

    _exchange.RendezvousExchange._get = get  # type: ignore[method-assign]


def before_it_connects() -> None:
    _connect._Attempt._choose_route = die  # type: ignore[method-assign]


def half_connected() -> None:
    honest = _connect._Attempt._connect

    def connect(self: Any, peer: int, purpose: Any, *rest: Any) -> Any:
        if purpose == _connect.Purpose.P2P:
            die()
        return honest(self, peer, purpose, *rest)

    _connect._Attempt._connect = connect  # type: ignore[method-assign]


def while_it_awaits_others() -> None:
    _connect._Attempt._await_higher = die  # type: ignore[method-assign]


def when_it_is_through() -> None:
    honest = rendezvous.connect_mesh

    def connect_mesh(*args: Any, **how: Any) -> Any:
        honest(*args, **how)
        die()

    rendezvous.connect_mesh = connect_mesh


STAGES = (
    before_it_sends_its_address,
    with_its_address_published,
    before_it_connects,
    half_connected,
    while_it_awaits_others,
    when_it_is_through,
)


@over_processes
@pytest.mark.parametrize(
    ("stage", "victim"),
    [(stage, victim) for stage in STAGES for victim in (0, 2) if victim or stage != half_connected],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_all_name_a_rank_that_is_killed(
    stage: Callable[[], None], victim: int, transport: str
) -> None:
    store = f"unix://gradwire-test-{secrets.token_hex(8)}"
    assert_all_name(victim, stage, LaunchInfo(0, P, store=store, rank_0_hosts=True), transport)


@pytest.mark.parametrize(
    ("stage", "victim"),
    [
        *((stage, 2) for stage in STAGES),
        (before_it_sends_its_address, 0),
        (while_it_awaits_others, 0),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_all_name_a_rank_that_is_killed_though_they_meet_by_torchs_store(
    stage: Callable[[], None], victim: int, torchs_store: str
) -> None:
    assert_all_name(victim, stage, LaunchInfo(0, P, store=torchs_store, local_size=P), "shm")


@pytest.fixture
def torchs_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the one of torchrun's agent."""
    pytest.importorskip("torch.distributed")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with agents_store() as port:
        yield f"torch://127.0.0.1:{port}"


def assert_all_name(
    victim: int, stage: Callable[[], None], base: LaunchInfo, transport: str
) -> None:
    """P ranks meet, one of which is killed at a stage: all others raise soon, with its number."""

    def make(mesh: Mesh) -> None:
        with from_mesh(mesh, timeout=60):
            pass

    def body(rank: int) -> tuple[float, gradwire.TransportError]:
        if rank == victim:
            stage()
        with pytest.raises(gradwire.TransportError) as raised:
            rendezvous.rendezvous(
                replace(base, rank=rank), make, timeout=60, transports=[transport]
            )
        return own_time(), raised.value

    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(P):
            ranks.append(Rank(None, lambda _, rank=rank: body(rank)))
            stack.callback(ranks[-1].close)
        death = ranks[victim].died()
        for rank in set(range(P)) - {victim}:
            outcome = ranks[rank].outcome()
            assert outcome.error is None, outcome.error
            when, error = outcome.value
            assert when - death < SOON, error
            assert error.peer == victim, error
            assert f"rank {victim}" in str(error)


def test_through_torchs_store_all_hear_of_a_rank_that_gives_up(
    monkeypatch: pytest.MonkeyPatch, torchs_store: str
) -> None:
    honest = _exchange.RendezvousExchange.exchange_addresses

    def exchange(exchange: _exchange.RendezvousExchange, *rest: Any) -> list[bytes]:
        if exchange.launch.rank == 2:
            raise SystemExit("enough")
        return honest(exchange, *rest)

    monkeypatch.setattr(_exchange.RendezvousExchange, "exchange_addresses", exchange)

    def body(rank: int) -> str:
        place = LaunchInfo(rank, P, store=torchs_store, local_size=P)
        with pytest.raises((gradwire.RendezvousError, SystemExit)) as raised:
            rendezvous.rendezvous(place, lambda mesh: mesh, timeout=60)
        return str(raised.value)

    begun = time.monotonic()
    with ThreadPoolExecutor(P) as pool:
        texts = list(pool.map(body, range(P)))
    assert time.monotonic() - begun < 30
    assert texts.pop(2) == "enough"
    assert all("rank 2" in text and "gave up: enough" in text for text in texts), texts


def test_who_comes_late_hears_why_rank_0_gave_up(torchs_store: str) -> None:
    """The store of rank 0 is gone by then, and torch's has the reason."""
    place = LaunchInfo(0, 2, store=torchs_store, local_size=2)
    for rank in range(2):
        with pytest.raises(gradwire.RendezvousError, match="rank 1 of 2 did not appear"):
            rendezvous.rendezvous(replace(place, rank=rank), lambda mesh: mesh, timeout=0.3)


def test_who_comes_after_rank_0_was_killed_is_told_at_once(torchs_store: str) -> None:
    place = LaunchInfo(0, 2, store=torchs_store, local_size=2)

    def announce(_: object) -> None:
        _exchange.RendezvousExchange.abort_on_failure = die  # type: ignore[method-assign]
        rendezvous.rendezvous(place, lambda mesh: mesh, timeout=60)

    first = Rank(None, announce)
    first.died()
    first.close()
    began = own_time()
    with pytest.raises(gradwire.TransportError, match=r"the store at unix://.* is gone") as raised:
        rendezvous.rendezvous(replace(place, rank=1), lambda mesh: mesh, timeout=60)
    assert raised.value.peer == 0
    assert own_time() - began < SOON


def test_rank_0_waits_for_how_others_reach_a_store_that_is_on_its_host(torchs_store: str) -> None:
    """Nothing says that all ranks are on one host; here they are."""
    place = LaunchInfo(0, 3, store=torchs_store)

    def body(rank: int) -> str:
        mesh = rendezvous.rendezvous(replace(place, rank=rank), lambda mesh: mesh, timeout=20)
        mesh.close()
        return str(mesh.interface)

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(body, range(3))) == {"lo (127.0.0.1): all ranks are on this host"}


def test_ranks_that_do_not_all_have_the_secret_are_told(torchs_store: str) -> None:
    place = LaunchInfo(0, 2, store=torchs_store, local_size=2)

    def body(rank: int) -> str:
        secret = b"0123456789abcdef" if rank == 0 else None
        with pytest.raises(gradwire.RendezvousError) as raised:
            rendezvous.rendezvous(
                replace(place, rank=rank), lambda mesh: mesh, timeout=1, secret=secret
            )
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(body, range(2)))
    assert "rank 1 of 2 did not appear" in texts[0]
    assert "rank 0 has a GRADWIRE_SECRET and this rank has none" in texts[1]


@pytest.mark.parametrize(
    "data",
    [b"", b"tcp://127.0.0.1:1 - no-hex", b"127.0.0.1:1 - 00", b"\xff" * 9, b"unix://a no 00"],
)
def test_a_foreign_endpoint_of_a_store_is_refused(data: bytes) -> None:
    with pytest.raises(gradwire.RendezvousError, match="rank 0 advertised no store"):
        advertised_store.unpack_endpoint(data, None, Question())
