"""What survivors say to each other in a shrink, on lines whose other end may say anything.

input: what rank 1 of 3 says
"""

from __future__ import annotations

import socket
import sys

import atheris
from gradwire._bootstrap import lines as _lines
from instrument import cover

PIECE = 100  # bytes that arrive at a time


def test_one_input(data: bytes) -> None:
    """What is told is well-formed, and the end is told once."""
    ours, peer = socket.socketpair()
    lines = _lines.Lines([(1, ours.detach(), data[:7])], 3)
    told: list[_lines.Message | _lines.Gone] = []
    with peer:
        for at in range(7, min(len(data), 1 << 14), PIECE):
            if lines.peers:
                peer.send(data[at : at + PIECE])
                told += lines.poll(0)
    while lines.peers:
        told += lines.poll(0)
    lines.close()
    *messages, last = told
    assert isinstance(last, _lines.Gone)
    for each in messages:
        assert isinstance(each, _lines.Message)
        assert {1} <= each.view <= {0, 1, 2}


cover(_lines)
atheris.Setup(sys.argv, test_one_input)
atheris.Fuzz()
