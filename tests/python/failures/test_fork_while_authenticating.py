"""A fork while another thread authenticates a peer: the child can do so, too."""

from __future__ import annotations

import hmac
import os
import signal
import sys
import threading

import pytest
from gradwire import _core
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap import handshake, join_listener
from gradwire._bootstrap.handshake import Hello, Purpose
from ranks import LIMIT, nightly

SECRET = b"0123456789abcdef"
DATA = bytes(1 << 26)  # of which a digest takes a tenth of a second


def authenticate() -> None:
    hello = Hello("job", Purpose.JOIN)
    mine, other = (handshake._noise(first, SECRET, hello) for first in (True, False))
    other.read(mine.write(b""))
    assert mine.read(other.write(b"here")) == b"here"
    join_listener._signature("job", SECRET, b"where to join")


def in_a_thread() -> None:
    thread = AuthenticatingThread(target=authenticate)
    thread.start()
    thread.join()


@pytest.mark.parametrize("forks", [50, *nightly(150)])
def test_a_child_forked_meanwhile_can_authenticate(forks: int) -> None:
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            in_a_thread()  # a new one each time: libcrypto locks its list of them

    others = [threading.Thread(target=go_on) for _ in range(2)]
    for each in others:
        each.start()
    try:
        for _ in range(forks):
            if (child := os.fork()) == 0:
                signal.alarm(int(LIMIT))
                in_a_thread()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        over.set()
        for each in others:
            each.join()


def test_no_other_thread_runs_while_a_digest_is_made() -> None:
    """Nor may one fork, then: what libcrypto has locked is open again."""
    ticks, over = [0], threading.Event()

    def tick() -> None:
        while not over.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # threads change only where one lets another
    try:
        thread.start()
        before = ticks[0]
        _core.hmac_sha256(SECRET, DATA)
        during = ticks[0] - before
        hmac.digest(SECRET, DATA, "sha256")
        assert (during, ticks[0] > before) == (0, True)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
