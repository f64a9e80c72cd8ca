"""What a rank publishes of itself: it is fit to connect to, and to print.

input: an address card, what it says of its host or in a process group, why it gives up, or where
rank 0's store is, or its cost model
"""

from __future__ import annotations

import contextlib
import socket
import sys

import atheris
from gradwire import _model
from gradwire._bootstrap import announced_store, introduction, meeting, mesh
from gradwire._errors import RendezvousError, TransportError
from gradwire._host.interfaces import is_loopback
from instrument import cover


def use(card: mesh.Card) -> None:
    """Everything that `connect` does with a card, short of connecting."""
    assert mesh.unpack_card(card.pack(), 1) == card
    is_loopback(card.address)
    family = socket.AF_INET6 if ":" in card.address else socket.AF_INET
    socket.inet_pton(family, card.address.partition("%")[0])
    assert 0 <= card.port < 1 << 16
    assert card.where("tcp").isprintable()
    assert card.where("shm").isprintable()
    assert card.describe().isprintable()
    mesh.choose_transport(card, card)


def test_one_input(data: bytes) -> None:
    """Runs one input."""
    with contextlib.suppress(RendezvousError):
        use(mesh.unpack_card(data, 1))
    with contextlib.suppress(RendezvousError):
        host, target = meeting._unpack_host(data, 1)
        assert isinstance(host, str)
        assert not target or is_loopback(target) in (True, False)
    for rank in range(2):
        with contextlib.suppress(RendezvousError):
            said = introduction.read_introduction(data, rank)
            assert isinstance(said["host"], str)
            assert rank == 1 or said["has_secret"] or len(bytes.fromhex(said["secret"])) == 32
    failure = meeting._unpack_failure(data, 3)
    assert isinstance(failure, RendezvousError | TransportError)
    assert getattr(failure, "peer", 0) in range(3)
    with contextlib.suppress(RendezvousError):
        store, secret = announced_store.unpack_notice(data, None)
        assert store.local or 0 < store.port < 1 << 16
        assert secret
    with contextlib.suppress(RendezvousError):
        model = _model.unpack(data)
        assert _model.unpack(_model.pack(model)).digest == model.digest


cover(announced_store, introduction, meeting, mesh, _model)
atheris.Setup(sys.argv, test_one_input)
atheris.Fuzz()
