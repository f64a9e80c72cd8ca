"""Parts: what one process recorded, as bytes, in a file of its own until parts are merged.

A part is the line "gradwire trace part 1", the length of the header, the header as JSON, the events
of each track as they lie in the core's memory, and the line "end". So a part that was cut off is
found out.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire._errors import InvalidArgument
from gradwire._trace import clock
from gradwire._trace.track import Span, TracedRank, Track, background

SUFFIX = ".gradwire-part"

_MAGIC = b"gradwire trace part 1\n"
_END = b"\nend\n"

# csrc/gradwire/exec/trace/event_ring.h
EVENT = np.dtype(
    [
        ("kind", "u1"),
        ("flags", "u1"),
        ("round", "<u2"),
        ("peer", "<i4"),
        ("operation", "<u4"),
        ("segment", "<u4"),
        ("begin", "<u8"),
        ("duration", "<u8"),
        ("bytes", "<u8"),
        ("encode", "<u4"),
        ("decode", "<u4"),
        ("plain", "<u8"),
        ("label", "<u8"),
    ]
)
CALL, PHASE, SEND, RECEIVE, WAIT, LOCAL, MESSAGE, BLOCKED = range(1, 9)
REDUCES, AGAIN, READER, FAILED, SENT = 1, 2, 4, 8, 16


@dataclass
class TrackRecord:
    """One communicator's record."""

    place: TracedRank
    events: npt.NDArray[Any]  # of EVENT
    labels: dict[int, str]
    dropped: int  # events before the first one here
    spans: list[Span]
    spans_dropped: int
    unlabelled: int = 0  # texts for which there was no room


@dataclass
class TracePart:
    """The record of one process."""

    process: int
    host: str
    unix_offset: int  # what to add to its clock for nanoseconds since 1970
    unix_error: int
    tracks: list[TrackRecord]
    background: list[int] = field(default_factory=list)  # threads that wait on behalf of others
    forgotten: int = 0  # events of communicators for which there was no more room

    @property
    def ranks(self) -> list[int]:
        """The numbers in the job of the ranks that this process is."""
        return sorted({each.place.job_rank for each in self.tracks})

    @property
    def job(self) -> tuple[str, int]:
        """The job's name and tag."""
        return self.tracks[0].place.job, self.tracks[0].place.tag


def part_of(tracks: Sequence[Track], forgotten: int = 0) -> TracePart:
    """Reads what these tracks have recorded so far."""
    offset, error = clock.unix_offset()
    return TracePart(
        os.getpid(),
        socket.gethostname(),
        offset,
        error,
        [_record(each) for each in tracks],
        sorted(background),
        forgotten,
    )


def _record(track: Track) -> TrackRecord:
    events, dropped, labels, unlabelled = track.read()
    return TrackRecord(
        track.place,
        np.frombuffer(events, EVENT),
        labels,
        dropped,
        list(track.spans),
        track.spans_dropped,
        unlabelled,
    )


def pack(part: TracePart) -> bytes:
    """Encodes a part."""
    tracks = [
        {**vars(each), "place": each.place._asdict(), "events": len(each.events)}
        for each in part.tracks
    ]
    header = {**vars(part), "tracks": tracks}
    text = json.dumps(header).encode()
    blobs = [each.events.tobytes() for each in part.tracks]
    return b"".join([_MAGIC, len(text).to_bytes(8, "little"), text, *blobs, _END])


def unpack(data: bytes, where: str) -> TracePart:
    """Decodes a part; raises InvalidArgument, which names `where` it is from."""
    if not data.startswith(_MAGIC):
        if data and _MAGIC.startswith(data):
            raise _cut_off(where)
        raise InvalidArgument(f"{where} is no part of a trace by this version of gradwire")
    if not data.endswith(_END):
        raise _cut_off(where)
    try:
        return _unpack(memoryview(data)[len(_MAGIC) : len(data) - len(_END)], where)
    except (KeyError, TypeError, ValueError, IndexError, UnicodeDecodeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{where} is damaged: {error!r}") from error


def _unpack(data: memoryview, where: str) -> TracePart:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + length]))
    rest = data[8 + length :]
    tracks = []
    for each in header["tracks"]:
        size = int(each["events"]) * EVENT.itemsize
        if size > len(rest):
            raise _cut_off(where)
        place = TracedRank(**each["place"])
        tracks.append(
            TrackRecord(
                place,
                np.frombuffer(rest[:size], EVENT),
                {int(key): str(text) for key, text in each["labels"].items()},
                int(each["dropped"]),
                [Span(*span) for span in each["spans"]],
                int(each["spans_dropped"]),
                int(each["unlabelled"]),
            )
        )
        if place.job_rank < 0 or not _name_ranks(tracks[-1].events, place.size):
            raise ValueError("it names ranks that there are not")
        rest = rest[size:]
    if not tracks or len(rest):
        raise ValueError("its header and its length do not fit together")
    return TracePart(
        int(header["process"]),
        str(header["host"]),
        int(header["unix_offset"]),
        int(header["unix_error"]),
        tracks,
        list(header["background"]),
        int(header["forgotten"]),
    )


def _name_ranks(events: npt.NDArray[Any], size: int) -> bool:
    """Whether the peers of these events are ranks."""
    of_ranks = events["peer"][events["kind"] != BLOCKED]
    needed = events["peer"][np.isin(events["kind"], (SEND, RECEIVE, WAIT, MESSAGE))]
    return bool((of_ranks < size).all() and (needed >= 0).all())


def _cut_off(where: str) -> InvalidArgument:
    return InvalidArgument(
        f"{where} is cut off: its process ended while it wrote it, or the disk is full; remove it "
        "to merge the others"
    )


def write(part: TracePart, folder: Path) -> Path:
    """Writes a part into a folder, which is made if it is not there; returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = "-".join(map(str, part.ranks[:4]))
    path = folder / f"rank{ranks}-{part.host}-{part.process}{SUFFIX}"
    path.write_bytes(pack(part))
    return path


def read(folder: Path) -> list[TracePart]:
    """Reads all parts of a folder, which are one job's; raises InvalidArgument."""
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is no folder: give the one that GRADWIRE_TRACE named")
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise InvalidArgument(
            f"{folder} has no parts of traces (*{SUFFIX}): was GRADWIRE_TRACE set, and did a rank "
            "end by itself?"
        )
    found = [unpack(path.read_bytes(), str(path)) for path in files]
    jobs = sorted({each.job for each in found})
    if len(jobs) > 1:
        named = ", ".join(repr(name) for name, _ in jobs)
        raise InvalidArgument(
            f"{folder} has parts of {len(jobs)} jobs, {named}: give each a folder of its own"
        )
    return found
