"""A session of one rank among stand-ins for the others and for what is trained."""

from __future__ import annotations

from typing import Any
from unittest import mock

from gradwire import TransportError
from gradwire.torch.elastic.session import Session

BROKEN = TransportError("a link broke")


def scripted(comm: Any = None, **options: Any) -> Any:
    """A session among stand-ins, which is connected to `comm`."""
    wish = {"rates": None, "owns": False, "min_ranks": 2, "wait": 7.0, "patience": 9.0}
    wish |= {"verify": False, "settings": {}, **options}
    session: Any = Session(*(mock.Mock() for _ in range(4)), **wish)
    if comm is not None:
        session._use(comm)
    return session


def ranks(rank: int = 0, size: int = 2, joined: int = 0, others: Any = (True, 0, False)) -> Any:
    """A communicator whose other ranks report `others`."""
    comm = mock.Mock(rank=rank, size=size, joined=joined, closed=False)
    comm.all_gather_object.side_effect = lambda own: [
        own if each == rank else others for each in range(size)
    ]
    return comm
