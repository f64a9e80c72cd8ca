"""Taps that change bytes on their way: in a tcp link, a control socket, or shared memory."""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Callable

from gradwire import _core
from gradwire._host.encryption import Setting, setting

_HELLO = 48  # bytes that each end of a data link sends first
_TAG = 16  # bytes behind each message over a sealed socket
_RECORD = 4 + _TAG  # bytes that sealing adds to the first ones
_PREFIX = struct.Struct("<II")  # of a message in a tcp stream: its length, and that inverted
_HEADER = 32  # of a frame, in front of its payload
_CONTROL_FRAME = struct.Struct("<4sBBHiIIIQQII464s")  # as in transport/control.h
_CONTROL_TYPES, _FAILURE_KINDS = 6, 5

Alter = Callable[[bytearray, random.Random], bytes | None]  # None: not this one, try the next


class MessageTap:
    """Follows a tcp data link message by message; alters one once it is armed."""

    def __init__(self, rng: random.Random, alter: Alter) -> None:
        self._rng, self._alter = rng, alter
        self._incomplete = bytearray()
        self._hello = True
        self._armed = False

    def arm(self) -> None:
        """The next message that can be altered is."""
        self._armed = True

    def __call__(self, data: bytes) -> bytes:
        self._incomplete += data
        out = bytearray()
        while size := self._front():
            message = self._incomplete[:size]
            del self._incomplete[:size]
            out += message if self._hello else self._passed(message)
            self._hello = False
        return bytes(out)

    def _front(self) -> int:
        """The bytes of the first message, if all are here."""
        sealed = setting() is Setting.ON
        have, size = len(self._incomplete), _HELLO + (_RECORD if sealed else 0)
        if not self._hello:
            if have < _PREFIX.size:
                return 0
            size = _PREFIX.size + _padded(_PREFIX.unpack_from(self._incomplete)[0])
            size += _TAG if sealed else 0
        return size if have >= size else 0

    def _passed(self, message: bytearray) -> bytes:
        altered = self._alter(message, self._rng) if self._armed else None
        if altered is None:
            return bytes(message)
        self._armed = False
        return altered


def flip_header(message: bytearray, rng: random.Random) -> bytes:
    """One bit of the message's length or of the frame's header."""
    return _flipped(message, rng.randrange(8 * (_PREFIX.size + _HEADER)))


def flip_payload(message: bytearray, rng: random.Random) -> bytes | None:
    """One bit of what the frame carries."""
    length = _PREFIX.unpack_from(message)[0] - _HEADER
    if length <= 0:
        return None
    return _flipped(message, 8 * (_PREFIX.size + _HEADER) + rng.randrange(8 * length))


def truncate(message: bytearray, rng: random.Random) -> bytes:
    """A message that is whole in itself, with the first bytes of the frame only."""
    length = rng.randrange(_PREFIX.unpack_from(message)[0])
    prefix = _PREFIX.pack(length, length ^ 0xFFFFFFFF)
    if setting() is Setting.ON:  # with something for a tag
        return prefix + message[_PREFIX.size : _PREFIX.size + _padded(length) + _TAG]
    body = message[_PREFIX.size : _PREFIX.size + length]
    return prefix + body.ljust(_padded(length), b"\0")


def _padded(length: int) -> int:
    return (length + 7) // 8 * 8


def _flipped(data: bytearray, bit: int) -> bytes:
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


class BitTap:
    """Flips one bit of what passes next."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._done = rng, False

    def __call__(self, data: bytes) -> bytes:
        if self._done or not data:
            return data
        self._done = True
        return _flipped(bytearray(data), self._rng.randrange(8 * len(data)))


def foreign_bytes(rng: random.Random) -> bytes:
    """A frame and more, so that what follows is out of step too."""
    return rng.randbytes(_CONTROL_FRAME.size + rng.randint(0, 100))


def foreign_frame(rng: random.Random, ranks: int) -> bytes:
    """A control frame with every field within its range, and that nobody meant."""
    if _CONTROL_FRAME.size != _core.CONTROL_FRAME_BYTES:
        raise RuntimeError("transport/control.h has another frame by now: taps.py must follow")
    return _CONTROL_FRAME.pack(
        _core.CONTROL_MAGIC,
        rng.randint(1, _CONTROL_TYPES),
        rng.randint(1, _FAILURE_KINDS),
        rng.getrandbits(4),  # round
        rng.randint(-1, ranks - 1),  # faulty
        rng.getrandbits(4),  # calls
        rng.getrandbits(32),  # fingerprint
        rng.getrandbits(4),  # segment
        rng.getrandbits(64),  # digest
        rng.getrandbits(8),  # value
        rng.getrandbits(4),  # heard
        rng.getrandbits(3),  # flags
        rng.randbytes(40),
    )


class ArenaTap:
    """Alters frames that wait in a sender's shared memory; laid out as in transport's arena.cc."""

    _MAGIC, _LINE, _ENTRY, _PAGE, _CELLS_AT = 0x33415247, 64, 128, 4096, 192
    _IN_ENTRY = 0x7FFFFFFF  # instead of a cell: a small message

    def __init__(self, memory: int, *, reader: int, ranks: int, max_message: int) -> None:
        self._map = mmap.mmap(memory, os.fstat(memory).st_size)
        if struct.unpack_from("<I", self._map)[0] != self._MAGIC:
            raise RuntimeError("arena.cc has another layout by now: ArenaTap must follow")
        self._messages = max(16, 2 * ranks)
        entries_at = self._CELLS_AT + (self._messages + ranks) * self._LINE
        self._queue_at = entries_at + reader * self._messages * self._ENTRY
        self._data_at = _rounded(entries_at + ranks * self._messages * self._ENTRY, self._PAGE)
        self._stride = _rounded(max_message, self._PAGE) + self._PAGE

    def flip(self, rng: random.Random) -> bool:
        """One bit of a waiting frame's header, or of the word that says where it is."""
        waiting = [at for at in self._entries() if self._word(at)]
        if not waiting:
            return False
        entry = rng.choice(waiting)
        cell = (self._word(entry) & 0xFFFFFFFF) - 1
        header = entry + 8 if cell == self._IN_ENTRY else self._data_at + cell * self._stride
        at, bits = rng.choice(((entry, 64), (header, 8 * _HEADER)))
        bit = rng.randrange(bits)
        self._map[at + bit // 8] ^= 1 << bit % 8
        return True

    def close(self) -> None:
        """Unmaps it."""
        self._map.close()

    def _entries(self) -> range:
        end = self._queue_at + self._messages * self._ENTRY
        return range(self._queue_at, end, self._ENTRY)

    def _word(self, at: int) -> int:
        return int(struct.unpack_from("<Q", self._map, at)[0])


def _rounded(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit
