"""A rank that is killed while the ranks meet: all others say which it was, at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gradwire
import pytest
from gradwire import _connect, _meeting, _rendezvous
from gradwire._mesh import Mesh
from gradwire._world import World
from hosts import Rank

P = 4
SOON = 2.0  # seconds


def die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def before_its_card() -> None:
    _meeting.Meeting.exchange = die  # type: ignore[method-assign]


def with_its_card_published() -> None:
    honest = _meeting.Meeting._get

    def get(self: Any, what: str, *rest: Any) -> bytes:
        return die() if what == "card" else honest(self, what, *rest)

    _meeting.Meeting._get = get  # type: ignore[method-assign]


def before_it_connects() -> None:
    _connect._Attempt._route = die  # type: ignore[method-assign]


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
    honest = _rendezvous.connect_mesh

    def connect_mesh(*args: Any, **how: Any) -> Any:
        honest(*args, **how)
        die()

    _rendezvous.connect_mesh = connect_mesh


STAGES = (
    before_its_card,
    with_its_card_published,
    before_it_connects,
    half_connected,
    while_it_awaits_others,
    when_it_is_through,
)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("stage", "victim"),
    [(stage, victim) for stage in STAGES for victim in (0, 2) if victim or stage != half_connected],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_all_name_a_rank_that_is_killed(
    stage: Callable[[], None], victim: int, transport: str
) -> None:
    store = f"unix://gradwire-test-{secrets.token_hex(8)}"

    def make(mesh: Mesh) -> None:
        with gradwire._from_mesh(mesh, timeout=60):
            pass

    def body(rank: int) -> tuple[float, str]:
        if rank == victim:
            stage()
        place = World(rank, P, store=store, rank_0_hosts=True)
        try:
            _rendezvous.meet(place, make, timeout=60, transports=[transport])
        except (gradwire.RendezvousError, gradwire.TransportError) as error:
            return time.monotonic(), str(error)
        raise AssertionError("nothing failed")

    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(P):
            ranks.append(Rank(None, lambda _, rank=rank: body(rank)))
            stack.callback(ranks[-1].close)
        death = ranks[victim].died()
        for rank in set(range(P)) - {victim}:
            outcome = ranks[rank].outcome()
            assert outcome.error is None, outcome.error
            when, text = outcome.value
            assert when - death < SOON, text
            assert f"rank {victim}" in text, text


def test_through_torchs_store_all_hear_of_a_rank_that_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not tell whose connection ended, so of one that is killed they do not."""
    distributed = pytest.importorskip("torch.distributed")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    honest = _meeting.Meeting.exchange

    def exchange(meeting: _meeting.Meeting, *rest: Any) -> list[bytes]:
        if meeting.world.rank == 2:
            raise SystemExit("enough")
        return honest(meeting, *rest)

    monkeypatch.setattr(_meeting.Meeting, "exchange", exchange)

    def body(rank: int) -> str:
        place = World(rank, P, store=f"torch://127.0.0.1:{server.port}")
        with pytest.raises((gradwire.RendezvousError, SystemExit)) as raised:
            _rendezvous.rendezvous(place, timeout=60)
        return str(raised.value)

    begun = time.monotonic()
    with ThreadPoolExecutor(P) as pool:
        texts = list(pool.map(body, range(P)))
    assert time.monotonic() - begun < 30
    assert texts.pop(2) == "enough"
    assert all("rank 2" in text and "gave up: enough" in text for text in texts), texts
