"""SealedSocket: no way around its encryption."""

from __future__ import annotations

import socket

import pytest
from gradwire._host.sealed_socket import SealedSocket
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
