"""Messages between a coordinator and replicas: whatever comes, the parser says what is wrong."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from gradwire import InvalidArgument
from gradwire.serve._sandblaster.messages import (
    LENGTH,
    OF_COORDINATORS,
    OF_REPLICAS,
    Reader,
    pack,
)

VALID: list[tuple[str, dict[str, Any]]] = [
    ("hello", {"name": "replica 0 (host:1)", "portions": 12}),
    ("report", {"ticket": 3, "loss": 1.5}),
    ("forgotten", {"ticket": 3}),
    ("staged", {"batch": 1, "sequence": 0, "tickets": [3, 4]}),
    ("failed", {"text": "its function failed"}),
    ("welcome", {"replica": 0, "push_every": 8}),
    ("refused", {"text": "other portions"}),
    ("work", {"batch": 1, "ticket": 3, "portion": 2}),
    ("keep", {"batch": 1, "ticket": 3}),
    ("drop", {"batch": 1, "ticket": 3}),
    ("push", {"batch": 1}),
    ("end", {}),
    ("broken", {"text": "KeyError"}),
]
STREAM = b"".join(pack(what, **fields) for what, fields in VALID)


def read(data: bytes, step: int) -> tuple[list[dict[str, Any]], str]:
    """The messages in `data`, which comes in pieces of `step` bytes, and what was wrong."""
    reader, found = Reader((*OF_REPLICAS, *OF_COORDINATORS)), []
    for at in range(0, len(data), step):
        try:
            found += reader.feed(data[at : at + step])
        except InvalidArgument as error:
            return found, str(error)
    return found, ""


def test_a_stream_may_come_in_any_pieces() -> None:
    for step in (1, 7, len(STREAM)):
        found, wrong = read(STREAM, step)
        assert [(each.pop("what"), each) for each in found] == VALID
        assert not wrong


@pytest.mark.parametrize("seed", range(3))
def test_bytes_at_random_are_an_error_and_no_crash(seed: int) -> None:
    draw = random.Random(seed)
    refused = 0
    for _ in range(500):
        data = bytearray(STREAM if draw.random() < 0.8 else draw.randbytes(200))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        _, wrong = read(bytes(data), len(data))
        refused += bool(wrong)
        assert wrong.isprintable()
    assert refused > 250


@pytest.mark.parametrize(
    "text",
    [b"\xff", b"[" * 60_000, b"9" * 5000, b'{"what": "end", "what": []}', b'{"what": "push"}']
    + [b'{"what": "push", "batch": %s}' % odd for odd in (b"-1", b"1.5", b"true", b"1e400")]
    + [b'{"what": "report", "ticket": 0, "loss": %s}' % odd for odd in (b"NaN", b"1e400", b"[]")],
)
def test_odd_json_is_an_error_and_no_crash(text: bytes) -> None:
    reader = Reader((*OF_REPLICAS, *OF_COORDINATORS))
    with pytest.raises(InvalidArgument):
        reader.feed(LENGTH.pack(len(text)) + text)
    with contextlib.suppress(InvalidArgument):
        Reader(("end",)).feed(text)
