"""Joiners that prove themselves and then say nothing: the ranks' steps go on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import Communicator
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import handshake
from gradwire._bootstrap.handshake import Hello, Purpose, client_handshake
from gradwire._bootstrap.join_listener import JOIN_REQUEST, Backoff, Joiner, JoinListener
from gradwire._bootstrap.resize import open_listener
from gradwire._bootstrap.survivor_links import pack_message
from ranks import eventually

ASKS = pack_message(*JOIN_REQUEST)
SECRET = "0123456789abcdef"


def asked_by(comm: Communicator, listener: JoinListener, said: bytes) -> socket.socket:
    """Connects to the listener, proves that it knows the secret, and says something."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + listener._address.unix)
    job = comm._mesh.job
    hello = Hello(job.name, Purpose.JOIN, epoch=job.epoch, source=-1)
    sock = client_handshake(sock, hello, job.secret, Deadline(10))
    sock.sendall(said)
    return sock


@contextlib.contextmanager
def opened() -> Iterator[tuple[Communicator, JoinListener]]:
    with gradwire.init(rank=0, ranks=1, store="unix://nobody", secret=SECRET) as comm:
        listener = open_listener(comm._mesh)
        comm._use_listener(listener)
        comm._accepts_joins = True
        yield comm, listener


def test_a_joiner_counts_once_it_has_asked() -> None:
    with opened() as (comm, listener), asked_by(comm, listener, ASKS[:7]) as sock:
        eventually(lambda: listener._authenticator.pending)
        comm.barrier()
        assert not comm.should_resize()
        sock.sendall(ASKS[7:])
        eventually(lambda: comm.barrier() or comm.should_resize())
        (joiner,) = listener.take(9)
        joiner.sock.close()


@pytest.mark.parametrize("said", [b"", b"\0" * len(ASKS), ASKS[:-1]])
def test_others_are_told_to_go(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT", 1.0)
    with opened() as (comm, listener), asked_by(comm, listener, said) as sock:
        assert sock.recv(1) == b""
        assert not comm.should_resize()
        with asked_by(comm, listener, ASKS):
            eventually(lambda: listener._joiners)


def test_a_crowd_of_strangers_leaves_those_who_have_proved_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradwire._bootstrap.authenticator.MAX_PENDING", 2)
    with contextlib.ExitStack() as stack:
        comm, listener = stack.enter_context(opened())
        proved = stack.enter_context(asked_by(comm, listener, b""))
        crowd = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for each in crowd:
            each.connect("\0" + listener._address.unix)
        assert crowd[0].recv(1) == b""  # evicted
        proved.sendall(ASKS)
        eventually(lambda: listener._joiners)


def test_a_crowd_of_silent_joiners_evicts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire._bootstrap.authenticator.MAX_PENDING", 2)
    with opened() as (comm, listener), contextlib.ExitStack() as silent:
        first = silent.enter_context(asked_by(comm, listener, b""))
        for _ in range(3):
            silent.enter_context(asked_by(comm, listener, b""))
        assert first.recv(1) == b""
        with asked_by(comm, listener, ASKS):
            eventually(lambda: listener._joiners)


def test_steps_go_on_while_silent_joiners_come_again_and_again() -> None:
    """They took 5 s each. Counted are the seconds that the session spends on joiners."""
    with opened() as (comm, listener):
        ends = threading.Event()

        def annoy() -> None:
            while not ends.is_set():
                with asked_by(comm, listener, b"") as sock:
                    sock.settimeout(0.05)
                    with contextlib.suppress(OSError):
                        sock.recv(1)

        thread = threading.Thread(target=annoy)
        thread.start()
        try:
            eventually(lambda: listener._authenticator.pending)
            began, lost = time.monotonic(), 0.0
            while time.monotonic() < began + 1:
                comm.all_reduce(np.ones(10, np.float32))
                if comm.should_resize():
                    before = time.monotonic()
                    comm = comm.resize()
                    lost += time.monotonic() - before
            took = time.monotonic() - began
        finally:
            ends.set()
            thread.join()
        assert lost <= 0.05 * took


def test_a_joiner_that_falls_silent_takes_a_twentieth_of_the_time() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    lost = 0.0
    while clock.now < 10_000:
        clock.now += backoff.left  # steps
        backoff.note_taken(1)
        clock.now += 5
        lost += 5
        backoff.note_joined(0)
    assert lost / clock.now < 0.05
    assert backoff.left == 600


def test_pauses_grow_and_end_with_a_joiner_that_joins() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    found = []
    for joined in (0, 0, 0, 1, 0):
        backoff.note_taken(1)
        clock.now += 1 / 19
        backoff.note_joined(joined)
        found.append(backoff.left)
        clock.now += backoff.left
    assert found == pytest.approx([1, 2, 4, 0, 1])


def test_a_resize_that_lost_a_rank_took_no_time_for_joiners() -> None:
    """It waited ten seconds for a rank that was stopped, and a joiner that died was in it, too."""
    clock = Clock()
    backoff = Backoff(clock)
    backoff.note_taken(1)
    clock.now += 10
    backoff.note_joined(0, lost_rank=True)
    assert backoff.left == 0
    backoff.note_taken(1)
    clock.now += 1
    backoff.note_joined(0)
    assert backoff.left == 19


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_listener_waits_before_it_asks_for_another_resize(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    with opened() as (comm, listener):
        listener.serve(comm._mesh, lambda: asked.append(1))
        ours, theirs = socket.socketpair()
        listener._joiners.append(Joiner(theirs, -1))
        assert listener.take(1)
        listener.serve(comm._mesh, lambda: asked.append(1))  # in which nobody joined
        assert listener._backoff._seconds > 0
        listener._backoff._until = time.monotonic() + 3600
        with ours, listener._lock:
            listener._joiners.append(Joiner(theirs, -1))
            listener._wants_resize = True
        listener._request_resize()
        assert not asked
        listener._backoff._until = 0.0
        listener._request_resize()
        assert asked == [1]


def test_the_listener_asks_at_once_after_a_rank_was_lost() -> None:
    with opened() as (comm, listener):
        before = replace(comm._mesh, size=2)
        listener.serve(before, lambda: None)
        listener._backoff.note_taken(1)
        listener.serve(comm._mesh, lambda: None)
        assert listener._backoff.left == 0
