"""Messages between survivors in a shrink, on links whose other end may send anything.

input: what rank 1 of 3 sends
"""

from __future__ import annotations

import socket
import sys

import atheris
from gradwire._bootstrap import survivor_links as _links
from instrument import cover

PIECE = 100  # bytes that arrive at a time


def test_one_input(data: bytes) -> None:
    """Checks that messages are well-formed and that the end is reported once."""
    ours, peer = socket.socketpair()
    links = _links.SurvivorLinks([(1, ours.detach(), None, data[:7])], 3)
    received: list[_links.Message | _links.LinkEnded] = []
    with peer:
        for at in range(7, min(len(data), 1 << 14), PIECE):
            if links.peers:
                peer.send(data[at : at + PIECE])
                received += links.poll(0)
    while links.peers:
        received += links.poll(0)
    links.close()
    *messages, last = received
    assert isinstance(last, _links.LinkEnded)
    for each in messages:
        assert isinstance(each, _links.Message)
        assert {1} <= each.view.ranks <= {0, 1, 2}
        assert each.view.joiners is None or each.view.joiners <= set(range(_links.MOST_JOINERS))


cover(_links)
atheris.Setup(sys.argv, test_one_input)
atheris.Fuzz()
