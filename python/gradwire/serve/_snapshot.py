"""Snapshots of shards: a file for each, which replaces the older one only when it is complete.

    8 bytes   "GWSHARD2"
    8 bytes   length of what follows, little-endian
    JSON      table, shard, version, starts, names and lengths of the slots, number of frames
    uint64    updates of each frame
    parts     each slot's values, 2**20 at a time: length (4 bytes), payload of codec lossless
    4 bytes   CRC-32 of everything before

"GWSHARD1", of older files, has plain float32 in place of parts, and is read as well.
Snapshots of several shards are of different moments, as in Dean et al. 2012.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradwire import _core
from gradwire._errors import InvalidArgument, describe
from gradwire.codec import Lossless
from gradwire.serve._histories import History, parse

_PLAIN, _MAGIC = b"GWSHARD1", b"GWSHARD2"
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_PART = struct.Struct("<I")
_PART_VALUES = 1 << 20
_MOST_PER_BYTE = 64  # values: a block of 128 has 2 bytes at least
_READ_BYTES = 1 << 20

_BROKEN = (InvalidArgument, ValueError, KeyError, TypeError, AttributeError, struct.error)

_Number = TypeVar("_Number", np.uint64, np.float32)


class ShardState(NamedTuple):
    """All that a shard holds."""

    table: str  # the core's text of parameters, rule and codecs
    shard: int
    version: int
    steps: list[int]  # updates of each frame
    slots: dict[str, NDArray[np.float32]]  # "w", and the rule's own
    history: History = ()


def path_of(folder: Path, shard: int, shards: int) -> Path:
    """The file of a shard's snapshot."""
    return folder / f"shard-{shard}-of-{shards}.gradwire"


def write(path: Path, state: ShardState) -> None:
    """Writes a snapshot to a new file, which then replaces the older one; raises OSError.

    The new file's name may be guessed, so nothing that is there is followed or written to.
    """
    new = path.with_suffix(".new")
    about = {
        "table": state.table,
        "shard": state.shard,
        "version": state.version,
        "starts": state.history,
        "frames": len(state.steps),
        "slots": {name: len(values) for name, values in state.slots.items()},
    }
    head = json.dumps(about).encode()
    with contextlib.suppress(FileNotFoundError):  # of a process that died while it wrote
        new.unlink()
    try:
        with open(new, "wb", opener=_open_new) as file:
            checksum = 0
            begin = _MAGIC + _LENGTH.pack(len(head)) + head
            steps = np.array(state.steps, np.uint64)
            packed = itertools.chain.from_iterable(map(_packed, state.slots.values()))
            for part in itertools.chain((begin, steps.tobytes()), packed):
                file.write(part)
                checksum = zlib.crc32(part, checksum)
            file.write(_CHECKSUM.pack(checksum))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    _sync_folder(path.parent)


def read(path: Path) -> ShardState:
    """Reads a snapshot; raises InvalidArgument for a file that is none, or is damaged."""
    state, problem = None, ""
    with path.open("rb") as file:
        reader = _Reader(file)
        magic = reader.take(len(_MAGIC)) if reader.left >= len(_MAGIC) else b""
        if magic not in (_PLAIN, _MAGIC):
            raise InvalidArgument(f"{path} is no snapshot of a shard")
        try:
            state = _unpack(reader, packed=magic == _MAGIC)
        except RecursionError:
            problem = "its description is nested too deeply"
        except _BROKEN as error:
            problem = describe(error)
        if not reader.check():
            raise InvalidArgument(
                f"{path} is damaged: its checksum does not fit; remove it, and the clients will "
                "begin anew"
            )
    if state is None:
        raise InvalidArgument(f"{path} is a snapshot of another version: {problem}")
    return state


class _Reader:
    """Reads a file's parts into memory of their own, and what they add up to."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._checksum = file, 0
        self.left = os.fstat(file.fileno()).st_size - _CHECKSUM.size

    def take(self, size: int) -> bytes:
        """The next bytes; raises ValueError where there are not so many."""
        self._reserve(size)
        part = self._file.read(size)
        self._checksum = zlib.crc32(part, self._checksum)
        return part

    def array(self, dtype: type[_Number], count: int) -> NDArray[_Number]:
        """The next numbers."""
        self._reserve(count * np.dtype(dtype).itemsize)
        values = np.empty(count, dtype)
        self._file.readinto(_bytes(values))  # type: ignore[attr-defined]
        self._checksum = zlib.crc32(_bytes(values), self._checksum)
        return values

    def packed(self, count: int) -> NDArray[np.float32]:
        """The next values, of packed parts."""
        if count > self.left * _MOST_PER_BYTE:
            raise ValueError(f"{count} values are announced, and {self.left} bytes are left")
        values = np.empty(count, np.float32)
        for part in _parts(values):
            (length,) = _PART.unpack(self.take(_PART.size))
            part[:] = Lossless().decode(self.take(length), len(part))
        return values

    def check(self) -> bool:
        """Whether the file ends with the checksum of all before; reads what is left."""
        while part := self._file.read(min(self.left, _READ_BYTES)) if self.left > 0 else b"":
            self.left -= len(part)
            self._checksum = zlib.crc32(part, self._checksum)
        return self._file.read(_CHECKSUM.size) == _CHECKSUM.pack(self._checksum)

    def _reserve(self, size: int) -> None:
        if not 0 <= size <= self.left:
            raise ValueError(f"{size} bytes are announced, and {self.left} are left")
        self.left -= size


def _unpack(reader: _Reader, *, packed: bool) -> ShardState:
    (length,) = _LENGTH.unpack(reader.take(_LENGTH.size))
    about: dict[str, Any] = json.loads(reader.take(length))
    history = parse(about.get("starts", ()))  # older files have none
    shard, version = _number(about["shard"]), _number(about["version"])
    frames, table = _number(about["frames"]), about["table"]
    if not isinstance(table, str) or shard >= 1 << 32 or version == _core.SERVE_NO_VERSION:
        raise ValueError("its table is no text, its shard no number of one, or it has no values")
    steps = reader.array(np.uint64, frames)
    sizes = {name: _number(size) for name, size in about["slots"].items()}
    values = reader.packed if packed else functools.partial(reader.array, np.float32)
    slots = {name: values(size) for name, size in sizes.items()}
    if reader.left:
        raise ValueError(f"{reader.left} bytes too many")
    return ShardState(table, shard, version, steps.tolist(), slots, history)


def _number(given: object) -> int:
    """Checks a number of 64 bits."""
    if type(given) is not int or not 0 <= given < 1 << 64:
        raise ValueError(f"{given!r:.50} is no number of 64 bits")
    return given


def _open_new(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def _parts(values: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    for first in range(0, len(values), _PART_VALUES):
        yield values[first : first + _PART_VALUES]


def _packed(values: NDArray[np.float32]) -> Iterator[bytes | memoryview]:
    for part in _parts(values):
        payload = Lossless().encode(part)
        yield _PART.pack(len(payload))
        yield _bytes(payload)


def _bytes(values: NDArray[Any]) -> memoryview:
    """The bytes of an array, not copied."""
    return memoryview(values.view(np.uint8))  # type: ignore[arg-type]


def _sync_folder(folder: Path) -> None:
    """Makes the new name survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
