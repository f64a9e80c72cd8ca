"""Messages between a coordinator and a replica: a length, then a JSON object of known fields.

What comes from the other end is checked here: its size, its fields and their types.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

from gradwire._errors import InvalidArgument, describe

LENGTH = struct.Struct("<I")
MAX_BYTES = 1 << 16
MAX_TEXT = 2000  # characters, of an error
MAX_NUMBER = 1 << 62

Message = dict[str, Any]

# By the message's name, its fields: "number" (not negative), "numbers", "real" or "text".
_FIELDS: dict[str, dict[str, str]] = {
    # A replica says:
    "hello": {"name": "text", "portions": "number"},
    "report": {"ticket": "number", "loss": "real"},
    "forgotten": {"ticket": "number"},
    "staged": {"batch": "number", "sequence": "number", "tickets": "numbers"},
    "failed": {"text": "text"},
    # A coordinator says:
    "welcome": {"replica": "number", "push_every": "number"},
    "refused": {"text": "text"},
    "work": {"batch": "number", "ticket": "number", "portion": "number"},
    "keep": {"batch": "number", "ticket": "number"},
    "drop": {"batch": "number", "ticket": "number"},
    "push": {"batch": "number"},
    "end": {},
    "broken": {"text": "text"},
}
OF_REPLICAS = ("hello", "report", "forgotten", "staged", "failed")
OF_COORDINATORS = ("welcome", "refused", "work", "keep", "drop", "push", "end", "broken")


def pack(what: str, **fields: Any) -> bytes:
    """Encodes a message, with its length."""
    text = json.dumps({"what": what, **fields}).encode()
    assert len(text) <= MAX_BYTES, what
    return LENGTH.pack(len(text)) + text


class Reader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, expected: tuple[str, ...]) -> None:
        """`expected` are the names of messages that the other end may send."""
        self._expected = expected
        self._bytes = b""

    def feed(self, data: bytes) -> list[Message]:
        """Takes bytes, and returns the messages that are complete; raises InvalidArgument."""
        self._bytes += data
        found = []
        while len(self._bytes) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes)
            if length > MAX_BYTES:
                raise InvalidArgument(f"it sent a message of {length} bytes")
            end = LENGTH.size + length
            if len(self._bytes) < end:
                break
            found.append(_read(self._bytes[LENGTH.size : end], self._expected))
            self._bytes = self._bytes[end:]
        return found


def _read(text: bytes, expected: tuple[str, ...]) -> Message:
    try:
        found: Message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"it sent what is no JSON: {describe(error)[:80]}") from None
    what = found.get("what") if isinstance(found, dict) else None
    if not isinstance(what, str) or what not in expected:
        raise InvalidArgument(f"it sent the message {str(what)[:80]!r}, which was not expected")
    fields = _FIELDS[what]
    if found.keys() != {"what", *fields}:
        raise InvalidArgument(f"its message {what!r} has other fields than {sorted(fields)}")
    for name, kind in fields.items():
        if not _CHECKS[kind](found[name]):
            raise InvalidArgument(f"its message {what!r} has no {kind} as {name!r}")
    return found


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_real(value: object) -> bool:
    """A finite number, or an integer that has a float."""
    if type(value) is int:
        return abs(value) < MAX_NUMBER
    return type(value) is float and math.isfinite(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


_CHECKS = {"number": _is_number, "numbers": _is_numbers, "real": _is_real, "text": _is_text}
