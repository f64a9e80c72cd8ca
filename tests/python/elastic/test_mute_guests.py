"""Guests that prove themselves and then say nothing: the ranks' steps go on."""

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
from gradwire._bootstrap import waiting_room
from gradwire._bootstrap.admission import open_door
from gradwire._bootstrap.door import Door
from gradwire._bootstrap.handshake import Hello, Purpose, client_handshake
from gradwire._bootstrap.waiting_room import KNOCK, Guest, Quiet
from ranks import eventually

SECRET = "0123456789abcdef"


def knock(comm: Communicator, door: Door, said: bytes) -> socket.socket:
    """Connects to the door, proves that it knows the secret, and says something."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + door._address.unix)
    job = comm._mesh.job
    hello = Hello(job.name, Purpose.JOIN, epoch=job.epoch, source=-1)
    sock = client_handshake(sock, hello, job.secret, Deadline(10))
    sock.sendall(said)
    return sock


@contextlib.contextmanager
def opened() -> Iterator[tuple[Communicator, Door]]:
    with gradwire.init(rank=0, size=1, store="unix://nobody", secret=SECRET) as comm:
        door = open_door(comm._mesh)
        comm._use_door(door)
        yield comm, door


def test_a_guest_counts_once_it_has_knocked() -> None:
    with opened() as (comm, door), knock(comm, door, KNOCK[:7]) as sock:
        eventually(lambda: door._waiting.count)
        comm.barrier()
        assert not comm.should_resize()
        sock.sendall(KNOCK[7:])
        eventually(lambda: comm.barrier() or comm.should_resize())
        (guest,) = door.take(9)
        guest.sock.close()


@pytest.mark.parametrize("said", [b"", b"\0" * len(KNOCK), KNOCK[:-1]])
def test_others_are_told_to_go(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "LIMIT_SECONDS", 0.1)
    with opened() as (comm, door), knock(comm, door, said) as sock:
        assert sock.recv(1) == b""
        assert not comm.should_resize()
        with knock(comm, door, KNOCK):
            eventually(lambda: door._guests)


def test_a_crowd_of_mute_guests_evicts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "_MOST_WAITING", 2)
    with opened() as (comm, door), contextlib.ExitStack() as mute:
        first = mute.enter_context(knock(comm, door, b""))
        for _ in range(3):
            mute.enter_context(knock(comm, door, b""))
        assert first.recv(1) == b""
        with knock(comm, door, KNOCK):
            eventually(lambda: door._guests)


def test_steps_go_on_while_mute_guests_come_again_and_again() -> None:
    """They took 5 s each. Counted are the seconds that the session spends for guests, not steps."""
    with opened() as (comm, door):
        ends = threading.Event()

        def annoy() -> None:
            while not ends.is_set():
                with knock(comm, door, b"") as sock:
                    sock.settimeout(0.05)
                    with contextlib.suppress(OSError):
                        sock.recv(1)

        thread = threading.Thread(target=annoy)
        thread.start()
        try:
            eventually(lambda: door._waiting.count)
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


def test_a_guest_that_falls_silent_takes_a_twentieth_of_the_time() -> None:
    clock = Clock()
    quiet = Quiet(clock)
    lost = 0.0
    while clock.now < 10_000:
        clock.now += quiet.left  # steps
        quiet.note_taken(1)
        clock.now += 5
        lost += 5
        quiet.note_joined(0)
    assert lost / clock.now < 0.05
    assert quiet.left == 600


def test_pauses_grow_and_end_with_a_guest_that_joins() -> None:
    clock = Clock()
    quiet = Quiet(clock)
    found = []
    for joined in (0, 0, 0, 1, 0):
        quiet.note_taken(1)
        clock.now += 1
        quiet.note_joined(joined)
        found.append(quiet.left)
        clock.now += quiet.left
    assert found == [19, 38, 76, 0, 19]


def test_a_resize_that_lost_a_rank_took_no_time_for_guests() -> None:
    """It waited ten seconds for a rank that was stopped, and a guest that died was in it, too."""
    clock = Clock()
    quiet = Quiet(clock)
    quiet.note_taken(1)
    clock.now += 10
    quiet.note_joined(0, lost_rank=True)
    assert quiet.left == 0
    quiet.note_taken(1)
    clock.now += 1
    quiet.note_joined(0)
    assert quiet.left == 19


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_door_waits_before_it_asks_for_another_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    with opened() as (comm, door):
        door.serve(comm._mesh, lambda: asked.append(1))
        ours, theirs = socket.socketpair()
        door._quiet.note_taken(1)
        door.serve(comm._mesh, lambda: asked.append(1))  # in which nobody joined
        door._quiet._until = time.monotonic() + 3600
        with ours, door._lock:
            door._guests.append(Guest(theirs, -1))
            door._asks = True
        door._ask()
        assert not asked
        door._quiet._until = 0.0
        door._ask()
        assert asked == [1]


def test_the_door_asks_at_once_after_a_rank_was_lost() -> None:
    with opened() as (comm, door):
        before = replace(comm._mesh, size=2)
        door.serve(before, lambda: None)
        door._quiet.note_taken(1)
        door.serve(comm._mesh, lambda: None)
        assert door._quiet.left == 0
