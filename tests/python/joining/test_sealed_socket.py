"""SealedSocket: one timeout for a call, and no way around its encryption."""

from __future__ import annotations

import socket
import threading

import pytest
from gradwire._host.sealed_socket import SealedSocket
from ranks import LIMIT
from sealing import seals, tcp_pair

SEALED = {"recv", "send", "sendall"}


def other_ways() -> list[str]:
    """All methods of a socket by which bytes could come or go, or that share its descriptor."""
    names = [each for each in dir(socket.socket) if each.startswith(("recv", "send"))]
    return [*sorted(set(names) - SEALED), "dup", "makefile"]


@pytest.mark.parametrize("name", other_ways())
def test_a_sealed_socket_has_no_way_around_its_seal(name: str) -> None:
    (one, other), (here, _) = tcp_pair(), seals()
    with SealedSocket(one, here) as sealed, other:
        sealed.setblocking(False)
        with pytest.raises(TypeError, match=f"a sealed socket has no {name}"):
            getattr(sealed, name)(b"plain")
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_who_sends_a_byte_now_and_then_does_not_stretch_the_timeout() -> None:
    """A byte comes well within each timeout, and the record not within ten of them."""
    (near, far), (here, there) = tcp_pair(), seals()
    record = here.records(b"text")
    ends = threading.Event()

    def drip() -> None:
        for byte in record[:-1]:
            if ends.wait(0.1):
                break
            near.sendall(bytes([byte]))
            sent.append(byte)

    sent: list[int] = []
    dripping = threading.Thread(target=drip)
    with near, SealedSocket(far, there) as sealed:
        sealed.settimeout(0.25)
        dripping.start()
        with pytest.raises(TimeoutError):
            sealed.recv(4)
        assert len(sent) < len(record) - 1
        assert sealed.gettimeout() == 0.25
        ends.set()
        dripping.join()
        near.sendall(record[len(sent) :])
        sealed.settimeout(LIMIT)
        assert sealed.recv(4) == b"text"
