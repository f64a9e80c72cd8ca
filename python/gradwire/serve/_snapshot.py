"""Snapshots of shards: a file for each, which replaces the older one only when it is complete.

    8 bytes   "GWSHARD1"
    8 bytes   length of what follows, little-endian
    JSON      table, shard, version, names and lengths of the slots, number of frames
    uint64    updates of each frame
    float32   each slot's values
    4 bytes   CRC-32 of everything before

Snapshots of several shards are of different moments, as in Dean et al. 2012.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire._errors import InvalidArgument

_MAGIC = b"GWSHARD1"
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


class ShardState(NamedTuple):
    """All that a shard holds."""

    table: str  # the core's text of parameters, rule and codecs
    shard: int
    version: int
    steps: list[int]  # updates of each frame
    slots: dict[str, NDArray[np.float32]]  # "w", and the rule's own


def path_of(folder: Path, shard: int, shards: int) -> Path:
    """The file of a shard's snapshot."""
    return folder / f"shard-{shard}-of-{shards}.gradwire"


def write(path: Path, state: ShardState) -> None:
    """Writes a snapshot to a new file, which then replaces the older one; raises OSError."""
    new = path.with_suffix(".new")
    about = {
        "table": state.table,
        "shard": state.shard,
        "version": state.version,
        "frames": len(state.steps),
        "slots": {name: len(values) for name, values in state.slots.items()},
    }
    head = json.dumps(about).encode()
    try:
        with new.open("wb") as file:
            checksum = 0
            begin = _MAGIC + _LENGTH.pack(len(head)) + head
            steps = np.array(state.steps, np.uint64)
            parts: list[bytes | memoryview] = [begin, steps.tobytes()]
            for part in (*parts, *map(_bytes, state.slots.values())):
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
    data = memoryview(path.read_bytes())
    body = data[: -_CHECKSUM.size]
    if len(data) < len(_MAGIC) + _LENGTH.size + _CHECKSUM.size or body[: len(_MAGIC)] != _MAGIC:
        raise InvalidArgument(f"{path} is no snapshot of a shard")
    if _CHECKSUM.unpack(data[len(body) :])[0] != zlib.crc32(body):
        raise InvalidArgument(
            f"{path} is damaged: its checksum does not fit; remove it, and the clients will "
            "begin anew"
        )
    try:
        return _unpack(body)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise InvalidArgument(f"{path} is a snapshot of another version: {error}") from None


def _unpack(body: memoryview) -> ShardState:
    begin = len(_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack(body[len(_MAGIC) : begin])
    about: dict[str, Any] = json.loads(bytes(body[begin : begin + length]))
    at = begin + length
    steps = np.frombuffer(body, np.uint64, about["frames"], at)
    at += steps.nbytes
    slots = {}
    for name, size in about["slots"].items():
        slots[name] = np.frombuffer(body, np.float32, size, at)
        at += slots[name].nbytes
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes too many")
    return ShardState(about["table"], about["shard"], about["version"], steps.tolist(), slots)


def _bytes(values: NDArray[np.float32]) -> memoryview:
    """The bytes of an array, not copied."""
    return memoryview(values.view(np.uint8))  # type: ignore[arg-type]


def _sync_folder(folder: Path) -> None:
    """Makes the new name survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
