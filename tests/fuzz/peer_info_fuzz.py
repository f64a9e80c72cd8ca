"""What a rank publishes about itself: a decoded value is fit to connect to, and to print.

input: a rank's AddressInfo, its host, its host information in a process group, why it gives up,
the endpoint of rank 0's store, a question for its secret, its cost model, a join listener's entry,
or what a leader and its joiners tell each other; the hello of a handshake, and its Side
"""

from __future__ import annotations

import contextlib
import socket
import sys

import atheris
from gradwire import _model
from gradwire._bootstrap import (
    advertised_store,
    handshake,
    join_listener,
    joining,
    mesh,
    rendezvous_exchange,
    survivor_links,
)
from gradwire._bootstrap.through_torch import host_info
from gradwire._bootstrap.through_torch.open_exchange import QUESTION_BYTES, Question, answer_to
from gradwire._errors import RendezvousError, TransportError
from gradwire._host import encryption
from gradwire._host.interfaces import is_loopback
from instrument import cover


def use(info: mesh.AddressInfo) -> None:
    """Uses an AddressInfo in every way that `connect` does, short of connecting."""
    assert mesh.unpack_address_info(info.pack(), 1) == info
    is_loopback(info.address)
    family = socket.AF_INET6 if ":" in info.address else socket.AF_INET
    socket.inet_pton(family, info.address.partition("%")[0])
    assert 0 <= info.port < 1 << 16
    assert info.where("tcp").isprintable()
    assert info.where("shm").isprintable()
    assert info.describe().isprintable()
    mesh.choose_transport(info, info)


def test_one_input(data: bytes) -> None:
    """Runs one input."""
    with contextlib.suppress(RendezvousError):
        use(mesh.unpack_address_info(data, 1))
    with contextlib.suppress(RendezvousError):
        host, target = rendezvous_exchange._unpack_host(data, 1)
        assert isinstance(host, str)
        assert not target or is_loopback(target) in (True, False)
    for rank in range(2):
        with contextlib.suppress(RendezvousError):
            found = host_info.unpack_host_info(data, rank)
            assert isinstance(found["host"], str)
            assert found["question"] is None or len(found["question"]) == QUESTION_BYTES
    failure = rendezvous_exchange._unpack_failure(data, 3)
    assert isinstance(failure, RendezvousError | TransportError)
    assert getattr(failure, "peer", 0) in range(3)
    with contextlib.suppress(RendezvousError):
        found = advertised_store.unpack_endpoint(data, b"known", None)
        assert found.address.local or 0 < found.address.port < 1 << 16
        assert found.secret == b"known"
    with contextlib.suppress(RendezvousError):
        found = advertised_store.unpack_endpoint(data, None, Question())
        assert found.address.local, "a foreign answer was believed"
    with contextlib.suppress(ValueError):
        answer_to(data, b"secret")
    with contextlib.suppress(RendezvousError):
        model = _model.unpack(data)
        assert _model.unpack(_model.pack(model)).digest == model.digest
    with contextlib.suppress(RendezvousError):
        signed = (
            join_listener._signature("job", b"secret", data) + b" " + data
        )  # reaches the parser
        found = join_listener.unpack_entry(signed, "job", b"secret")
        assert join_listener.unpack_entry(found.pack(), "job", b"secret") == found
        use(found.address)
    with contextlib.suppress(RendezvousError):
        join_listener.unpack_entry(data, "job", b"secret")
        raise AssertionError("a foreign entry was believed")
    with contextlib.suppress(encryption.Mismatch):
        side = encryption.unpack_side(data)
        assert encryption.unpack_side(side.pack()) == side
        encryption.agree(side, side)  # two ends that are alike never exclude each other
    with contextlib.suppress(handshake.HandshakeError):
        hello = handshake.unpack_hello(
            data[: handshake.HELLO_BYTES].ljust(handshake.HELLO_BYTES, b"\0"), "job"
        )
        assert handshake.unpack_hello(hello.pack(), "job") == hello
    with contextlib.suppress(ValueError):
        invitation = joining.unpack_invitation(data)
        assert joining.unpack_invitation(invitation.pack()) == invitation
        assert 0 <= invitation.rank < invitation.size
    with contextlib.suppress(ValueError):
        assert len(survivor_links.unpack_addresses(data, 2, 1).addresses) == 2


cover(
    advertised_store,
    encryption,
    joining,
    handshake,
    host_info,
    mesh,
    rendezvous_exchange,
    survivor_links,
    join_listener,
    _model,
)
atheris.Setup(sys.argv, test_one_input)
atheris.Fuzz()
