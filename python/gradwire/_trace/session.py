"""Recording: which communicators of this process record, from when on, and where to.

Recording begins by `trace`, or by GRADWIRE_TRACE for all communicators of a process.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from gradwire import _core
from gradwire._base import arguments, environment
from gradwire._errors import Error, InvalidArgument
from gradwire._trace import merge, parts
from gradwire._trace.parts import TracePart
from gradwire._trace.track import TracedRank, Track

_log = logging.getLogger("gradwire")

EVENTS = 1 << 16  # of each communicator; 64 bytes each
_MOST_ENDED = 32  # communicators that have ended, whose events are kept
_EXCHANGES = 8  # barriers by which the clocks are compared

_lock = threading.Lock()
_tracks: weakref.WeakSet[Track] = weakref.WeakSet()


class _Communicator(Protocol):
    """The part of a `Communicator` that is needed here."""

    _track: Track

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def barrier(self) -> Any:
        """Waits for all ranks."""

    def gather_object(self, x: Any, root: int = 0) -> Any:
        """Gathers objects of all ranks."""


class _Session:
    """Tracks that record; those of communicators that have ended stay in it."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.tracks: list[Track] = []
        self.forgotten = 0  # events of ended communicators that had to make room

    def add(self, track: Track) -> None:
        """Lets a track record."""
        track.start(self.events)
        self.tracks.append(track)
        ended = [each for each in self.tracks if each.ended]
        for each in ended[: max(0, len(ended) - _MOST_ENDED)]:
            self.tracks.remove(each)
            part = parts.part_of([each])
            self.forgotten += sum(len(its.events) + its.dropped for its in part.tracks)

    def part(self) -> TracePart | None:
        """Reads what was recorded; None for nothing."""
        return parts.part_of(self.tracks, self.forgotten) if self.tracks else None

    def end(self) -> None:
        """Ends recording."""
        for each in self.tracks:
            each.stop()
        self.tracks.clear()


_session: _Session | None = None


def track(
    core: _core.Communicator,
    place: TracedRank,
    owner: object,
    totals: _core.Totals | None = None,
) -> Track:
    """The track of a new communicator, which records if this process does."""
    global _session
    made = Track(core, place, owner, totals)
    with _lock:
        _tracks.add(made)
        if _session is None and environment.text("GRADWIRE_TRACE") is not None:
            _session = _Session(EVENTS)
        if _session is not None:
            _session.add(made)
    return made


def write_part() -> None:
    """Writes what this process recorded because of GRADWIRE_TRACE, at its end."""
    global _session
    folder = environment.text("GRADWIRE_TRACE")
    with _lock:
        ended, _session = _session, None
    if ended is None or folder is None:
        return
    part = ended.part()
    try:
        if part is not None:
            parts.write(part, Path(folder))
    except OSError as error:
        _log.warning("GRADWIRE_TRACE=%s: the trace of this process is lost: %s", folder, error)
    ended.end()


class trace:
    """Records all communicators of this process during a block, and writes one file of all ranks.

        with gradwire.trace("out.json"):
            train()

    Every rank enters and leaves the block, between the same calls. `communicator` is the one over
    which the clocks are compared and the records gathered, by default the largest that is open;
    rank 0 of it writes the file, in the Chrome trace event format, which https://ui.perfetto.dev
    opens. Without one, each process writes its own. `events` is how many of the last events each
    communicator keeps, of 64 bytes each; how many were dropped is in the file.

    Where a block raises on some rank, or the communicator fails, each rank leaves its part in the
    folder "out.json.parts", and `gradwire trace merge` makes a file of them. Raises InvalidArgument
    where this process records already, as with GRADWIRE_TRACE.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        communicator: _Communicator | None = None,
        events: int = EVENTS,
    ) -> None:
        """Takes the file's path, which may exist."""
        if not isinstance(path, str | os.PathLike):
            raise arguments.wrong(path, "path", "the path of a file")
        self._path = Path(path)
        self._given = communicator
        self._events = arguments.whole(events, "events", least=16)
        self._session: _Session | None = None

    def __enter__(self) -> trace:
        session = _Session(self._events)
        try:
            self._begin(session)
            self._compare_clocks()
        except BaseException:
            self._end(session)
            raise
        self._session = session
        return self

    def _begin(self, session: _Session) -> None:
        global _session
        with _lock:
            if _session is not None or environment.text("GRADWIRE_TRACE") is not None:
                raise InvalidArgument(
                    "this process records already: by another `with gradwire.trace(...)`, or "
                    "because GRADWIRE_TRACE or `gradwire run --trace` says so"
                )
            for each in _tracks:
                session.add(each)
            _session = session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        assert session is not None
        try:
            if error is not None:
                self._leave_part(session, "the block raised an exception")
            else:
                self._write(session)
        finally:
            self._end(session)

    def _end(self, session: _Session) -> None:
        global _session
        with _lock:
            if _session is session:
                _session = None
        session.end()

    def _write(self, session: _Session) -> None:
        try:
            found = self._gather(session)
        except Error as its:
            self._leave_part(session, str(its))
            raise
        if not found:
            return
        try:
            merge.write(found, self._path)
        except (OSError, InvalidArgument) as its:
            self._leave(found, str(its))
            raise

    def _gather(self, session: _Session) -> list[TracePart]:
        """The records to write here: those of all ranks on rank 0, and none on the others."""
        comm = self._compare_clocks()
        part = session.part()
        if part is None:
            _log.warning("%s: no communicator of this process has recorded anything", self._path)
            return []
        if comm is None:
            return [part]
        gathered = comm.gather_object(parts.pack(part))
        found = dict.fromkeys(gathered or ())  # ranks may be threads of one process
        return [parts.unpack(each, "a rank's record") for each in found]

    def _compare_clocks(self) -> _Communicator | None:
        """Exchanges messages, which are recorded; returns the communicator to gather over."""
        comm = self._communicator()
        for _ in range(_EXCHANGES if comm is not None else 0):
            comm.barrier()  # type: ignore[union-attr]
        return comm

    def _communicator(self) -> _Communicator | None:
        if self._given is not None:
            return self._given
        found = [each.owner for each in sorted(_tracks, key=lambda each: each.number)]
        usable = [each for each in found if each is not None and not each.closed]
        return max(usable, key=lambda each: each.size, default=None)  # the first of several

    def _leave_part(self, session: _Session, why: str) -> None:
        part = session.part()
        if part is not None:
            self._leave([part], why)

    def _leave(self, found: Sequence[TracePart], why: str) -> None:
        """Writes parts beside the file, which cannot be written now."""
        folder = Path(f"{self._path}.parts")
        for part in found:
            parts.write(part, folder)
        what = "this rank's part" if len(found) == 1 else f"{len(found)} ranks' parts"
        _log.warning(
            "%s: %s of the trace is in %s: gradwire trace merge %s %s",
            *(why, what, folder, folder, self._path),
        )


def _forget() -> None:
    """Forgets, in a forked child, what its parent records."""
    global _session, _lock
    _lock = threading.Lock()
    _session = None
    _tracks.clear()


os.register_at_fork(after_in_child=_forget)
