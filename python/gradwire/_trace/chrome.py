"""A process's record as events of the Chrome trace event format, which Perfetto reads.

Each rank is a process there, with a thread for each communicator's calls, one for its messages,
and one for each thread of the program. "Trace Event Format", Duval et al., Google 2016: complete
events ("X"), nestable asynchronous ones ("b", "e") and metadata ("M").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gradwire._trace import parts
from gradwire._trace.clocks import Clock, Messages, keys
from gradwire._trace.parts import TracePart, TrackRecord

Entry: TypeAlias = dict[str, Any]

# torch.profiler counts from the begin of such a period, and so do we: so both have one time axis.
_PERIOD = 3 * 2_629_746 * 1_000_000_000  # nanoseconds, a quarter of a year
_FIRST_THREAD = 5_000_000  # above every number that Linux gives a thread
_THREADS = 4  # numbers of each communicator
_TITLED = 3  # parameters in the name of a call
_LEAST = 0.2  # microseconds of a wait that are shown


def base_time(unix: int) -> int:
    """The time from which a file counts, in nanoseconds since 1970."""
    return unix - unix % _PERIOD


@dataclass
class Others:
    """The messages and phases of all processes, in nanoseconds since 1970."""

    sent: Messages  # by key, in their order
    begun: dict[tuple[int, int, int], int]  # a phase, by communicator, number and rank

    def staged_at(self, wanted: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Tells when each of these frames had been staged; -1 for those that nobody recorded."""
        if not len(self.sent.keys):
            return np.full(len(wanted), -1, np.int64)
        at = np.minimum(np.searchsorted(self.sent.keys, wanted), len(self.sent.keys) - 1)
        return np.where(self.sent.keys[at] == wanted, self.sent.ends[at], -1)


class Writer:
    """Turns the record of one process into entries."""

    def __init__(self, part: TracePart, clock: Clock, base: int) -> None:
        self._part, self._clock, self._base = part, clock, base

    def entries(self, others: Others) -> Iterator[Entry]:
        """All entries; `others` says what all processes did, on one time axis."""
        numbers = sorted({each.place.communicator for each in self._part.tracks})
        for rank in self._part.ranks:
            yield from self._named(rank, numbers)
        for track in self._part.tracks:
            thread = _FIRST_THREAD + _THREADS * numbers.index(track.place.communicator)
            yield from self._calls(track, thread)
            yield from self._frames(track, thread)
            yield from self._waits(track, thread, others)
            yield from self._wire(track, thread + 2, others)
            yield from self._program(track)

    def _named(self, rank: int, numbers: list[int]) -> Iterator[Entry]:
        part = self._part
        yield _meta("process_name", rank, 0, name=f"rank {rank} ({part.host}, {part.process})")
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
        for index, number in enumerate(numbers):
            thread = _FIRST_THREAD + _THREADS * index
            for more, what in enumerate(("calls", "messages", "wire")):
                text = f"{what} of communicator {number:08x}"
                yield _meta("thread_name", rank, thread + more, name=text)
                yield _meta("thread_sort_index", rank, thread + more, sort_index=more + 1)

    def _rows(self, events: npt.NDArray[Any]) -> Iterator[tuple[Entry, float]]:
        """Each event, and its begin in microseconds.

        Durations are by the same clock as begins: what lies within another event stays there.
        """
        begins = self._clock.unix(events["begin"])
        lengths = self._clock.unix(events["begin"] + events["duration"]) - begins
        times = (begins - self._base) / 1e3
        for event, at, length in zip(
            events.tolist(), times.tolist(), lengths.tolist(), strict=True
        ):
            yield dict(zip(parts.EVENT.names or (), event, strict=True)) | {"duration": length}, at

    def _calls(self, track: TrackRecord, thread: int) -> Iterator[Entry]:
        events = track.events
        rank, communicator = track.place.job_rank, track.place.communicator
        frames = events[events["kind"] == parts.SEND]
        order = np.argsort(frames["operation"], kind="stable")
        operations = frames["operation"][order]
        sums = np.concatenate([[0], np.cumsum(frames["plain"][order])])
        for kind in (parts.CALL, parts.PHASE):
            mine = events[events["kind"] == kind]
            for of, at in self._rows(mine):
                first, count = of["operation"], max(of["round"], 1)
                inside = np.searchsorted(operations, [first, first + count])
                args = {
                    "communicator": communicator,
                    "call": first,
                    "bytes_before": int(sums[inside[1]] - sums[inside[0]]),
                    "bytes_after": of["bytes"],
                }
                label = track.labels.get(of["label"], "")
                if kind == parts.PHASE:
                    name = label.partition(",")[0] or "phase"
                    yield _complete("phase", name, rank, thread, at, of, plan=label, **args)
                    continue
                queued = (of["encode"] << 32 | of["decode"]) / 1e3
                args |= {"phases": of["round"], "queued_us": queued, "input_bytes": of["plain"]}
                name, described = _described(label)
                described["transports"] = track.place.transports
                if of["flags"] & parts.FAILED:
                    described["failed"] = True
                yield _complete("call", name, rank, thread, at, of, **args, **described)
                yield from _submitted(
                    name, rank, thread, f"{communicator:x}.{rank}.{first:x}", at, queued, of
                )

    def _frames(self, track: TrackRecord, thread: int) -> Iterator[Entry]:
        place = track.place
        shown = np.isin(
            track.events["kind"], (parts.SEND, parts.RECEIVE, parts.LOCAL, parts.MESSAGE)
        )
        for of, at in self._rows(track.events[shown]):
            peer = place.job_ranks[of["peer"]] if of["peer"] >= 0 else None
            category, name = _kind(of, peer)
            args = {"communicator": place.communicator, "call": of["operation"]}
            if peer is not None:
                args["peer"] = peer
            if of["kind"] in (parts.SEND, parts.RECEIVE):
                args |= {"round": of["round"], "segment": of["segment"]}
                args |= {"bytes_before": of["plain"], "bytes_after": of["bytes"]}
            if of["kind"] == parts.MESSAGE:
                args |= {"part": of["segment"], "bytes_after": of["bytes"]}
            for what in ("encode", "decode"):
                if of[what]:
                    args[f"{what}_us"] = of[what] / 1e3
            if of["flags"] & parts.AGAIN:  # a part of the work that is shown before it
                of["duration"] = 0
            number = thread + 1 if of["kind"] == parts.MESSAGE else thread
            yield _complete(category, name, place.job_rank, number, at, of, **args)

    def _waits(self, track: TrackRecord, thread: int, others: Others) -> Iterator[Entry]:
        """Yields waits in two parts: until the peer had done its share, and for the link."""
        place = track.place
        indices = np.flatnonzero(track.events["kind"] == parts.WAIT)
        ready = self._ready(track, indices, others)
        rows = self._rows(track.events[indices])
        for (of, at), until in zip(rows, ready.tolist(), strict=True):
            peer = place.job_ranks[of["peer"]]
            reads = bool(of["flags"] & parts.READER)
            length = of["duration"] / 1e3
            late = min(max((until - self._base) / 1e3 - at, 0.0), length) if until >= 0 else length
            args = {"communicator": place.communicator, "call": of["operation"], "peer": peer}
            name = f"wait for {peer}{' to read' if reads else ''}"
            link = f"wire {'to' if reads else 'from'} {peer}"
            for category, text, begin, took in (
                ("wait", name, at, late),
                ("wire", link, at + late, length - late),
            ):
                if took >= _LEAST:
                    its = {"duration": took * 1e3}
                    yield _complete(category, text, place.job_rank, thread, begin, its, **args)

    def _ready(
        self, track: TrackRecord, waits: npt.NDArray[Any], others: Others
    ) -> npt.NDArray[np.int64]:
        """Tells when the peer of each wait had staged the frame, or begun to read; -1: unknown."""
        events, place = track.events, track.place
        ready = np.full(len(waits), -1, np.int64)
        following = np.minimum(waits + 1, len(events) - 1)
        ends = (events["kind"][following] == parts.RECEIVE) & (events["flags"][waits] == 0)
        ranks = np.array(place.job_ranks, np.uint64)
        wanted = keys(events[following[ends]], track, ranks, sent=False)
        ready[ends] = others.staged_at(wanted)
        for index in np.flatnonzero(events["flags"][waits] & parts.READER):
            event = events[waits[index]]
            key = (place.communicator, int(event["operation"]), place.job_ranks[event["peer"]])
            ready[index] = others.begun.get(key, -1)
        return ready

    def _wire(self, track: TrackRecord, thread: int, others: Others) -> Iterator[Entry]:
        """Yields the time of each frame between its staging there and its landing here."""
        events, place = track.events, track.place
        mine = events[events["kind"] == parts.RECEIVE]
        own = keys(mine, track, np.array(place.job_ranks, np.uint64), sent=False)
        _, here, there = np.intersect1d(own, others.sent.keys, return_indices=True)
        ends = (self._clock.unix(mine["begin"][here]) - self._base) / 1e3
        begins = np.minimum((others.sent.ends[there] - self._base) / 1e3, ends)
        for event, begin, end, key in zip(
            mine[here].tolist(), begins.tolist(), ends.tolist(), own[here].tolist(), strict=True
        ):
            of = dict(zip(parts.EVENT.names or (), event, strict=True))
            peer = place.job_ranks[of["peer"]]
            common = {
                "cat": "wire",
                "name": f"wire from {peer}",
                "id": f"{key:x}",
                "pid": place.job_rank,
                "tid": thread,
            }
            args = {"communicator": place.communicator, "call": of["operation"], "peer": peer}
            yield {"ph": "b", "ts": begin, **common, "args": {**args, "bytes_after": of["bytes"]}}
            yield {"ph": "e", "ts": end, **common}

    def _program(self, track: TrackRecord) -> Iterator[Entry]:
        """Yields what the program did, and when it waited for a call."""
        rank, background = track.place.job_rank, set(self._part.background)
        for span in track.spans:
            begin, end = self._clock.unix(np.array([span.begin, span.end])).tolist()
            at, of = (begin - self._base) / 1e3, {"duration": end - begin}
            yield _complete("program", span.name, rank, span.thread, at, of, **span.args)
        mine = track.events[track.events["kind"] == parts.BLOCKED]
        for of, at in self._rows(mine):
            if of["peer"] not in background:
                args = {"communicator": track.place.communicator}
                yield _complete("blocked", "blocked in a call", rank, of["peer"], at, of, **args)


def _meta(what: str, rank: int, thread: int, **args: Any) -> Entry:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "ts": 0, "args": args}


def _complete(
    category: str, name: str, rank: int, thread: int, at: float, of: Entry, /, **args: Any
) -> Entry:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": rank,
        "tid": thread,
        "ts": at,
        "dur": of["duration"] / 1e3,
        "args": args,
    }


def _submitted(
    name: str, rank: int, thread: int, number: str, at: float, queued: float, of: Entry
) -> Iterator[Entry]:
    """A call from its submission on, of which several may be under way."""
    common = {"cat": "submitted", "id": number, "pid": rank, "tid": thread}
    yield {"ph": "b", "name": name, "ts": at - queued, **common, "args": {}}
    yield {"ph": "b", "name": "queued", "ts": at - queued, **common, "args": {}}
    yield {"ph": "e", "name": "queued", "ts": at, **common}
    yield {"ph": "e", "name": name, "ts": at + of["duration"] / 1e3, **common}


def _described(label: str) -> tuple[str, dict[str, Any]]:
    """The name of a call, and what it reduces, in which codec, of which parameters."""
    first = (label or "call").split("\n")
    first += [""] * (4 - len(first))  # of a damaged file
    collective, dtype, op, codec, *lines = first
    titled = [line for line in lines if line.startswith("#")]
    named = [line for line in lines if not line.startswith("#")]
    title = titled[0][1:] if titled else ", ".join(named[:_TITLED])
    if not titled and len(named) > _TITLED:
        title += f" and {len(named) - _TITLED} more"
    args: dict[str, Any] = {"collective": collective, "dtype": dtype, "codec": codec}
    if op:
        args["op"] = op
    if named:
        args["parameters"] = named
    return (f"{collective}: {title}" if title else collective), args


def _kind(of: Entry, peer: int | None) -> tuple[str, str]:
    """Category and name of a frame, local work or a message."""
    kind, flags = of["kind"], of["flags"]
    if kind == parts.LOCAL:
        return "local", "encode and decode" if of["encode"] or of["decode"] else "local work"
    if kind == parts.MESSAGE:
        return "message", f"send to {peer}" if flags & parts.SENT else f"recv from {peer}"
    if kind == parts.SEND:
        category = "encode" if of["encode"] else "send"
        return category, f"{category} to {peer}"
    category = "reduce" if flags & parts.REDUCES else "receive"
    if of["decode"]:
        category = "decode"
    return category, f"{category} from {peer}"
