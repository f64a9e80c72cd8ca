"""Track: what one communicator of this process records, and the names of its calls."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from gradwire import _core
from gradwire._trace import clock


class TracedRank(NamedTuple):
    """A communicator of a job, and this rank in it."""

    job: str
    tag: int  # of the job
    communicator: int
    rank: int
    size: int
    job_ranks: Sequence[int]  # the number in the job of each rank
    transports: Sequence[str] = ()  # of this rank's links, each once

    @property
    def job_rank(self) -> int:
        """The number in the job of this rank."""
        return self.job_ranks[self.rank]


class Span(NamedTuple):
    """Something that the program did for a while; times are the clock's nanoseconds."""

    name: str
    begin: int
    end: int
    thread: int  # the operating system's number
    args: dict[str, Any]


class _Calls(threading.local):
    """The calls that this thread makes."""

    name: str | None = None  # lines, of which the first is the title


calls = _Calls()
background: set[int] = set()  # numbers of threads that wait for calls on behalf of others
_numbers = itertools.count()

# Events as they lie in memory, how many came before them, texts of labels, those without room.
Recorded: TypeAlias = tuple[bytes, int, dict[int, str], int]


class Track:
    """The record of a communicator: calls, by the core, and spans of the program."""

    def __init__(
        self,
        core: _core.Communicator,
        place: TracedRank,
        owner: Any,
        totals: _core.Totals | None = None,
    ) -> None:
        """`owner` is the communicator, which this does not keep alive; `totals` its counters."""
        self.place, self.number = place, next(_numbers)
        self._owner = weakref.ref(owner)
        self._core: _core.Communicator | None = core
        self._totals = totals
        self.recorder: _core.Recorder | None = None  # while it records
        self._kept: Recorded | None = None  # of a communicator that has ended
        self.spans: deque[Span] = deque()
        self.spans_dropped = 0
        if totals is not None:
            self._observe(None)

    @property
    def owner(self) -> Any:
        """The communicator; None when it is gone."""
        return self._owner()

    def start(self, events: int) -> None:
        """Records the last so many events from the next call on."""
        self.recorder, self._kept = _core.Recorder(events, clock.SKEW), None
        self.spans, self.spans_dropped = deque(maxlen=events), 0
        self._observe(self.recorder)

    def stop(self) -> None:
        """Ends recording, and forgets what was recorded."""
        self.recorder = self._kept = None
        self.spans = deque()
        self._observe(None)

    def release(self) -> None:
        """Lets the communicator go, which has ended; what was recorded stays, and no more."""
        if self.recorder is not None:
            self._kept = self.recorder.read()
            self.recorder = None
            self._observe(None)
        self._core = None

    @property
    def ended(self) -> bool:
        """Whether the communicator has been let go."""
        return self._core is None

    def read(self) -> Recorded:
        """Reads what was recorded of calls."""
        if self._kept is not None:
            return self._kept
        assert self.recorder is not None
        return self.recorder.read()

    def _observe(self, recorder: _core.Recorder | None) -> None:
        if self._core is not None and self._core.owned_here:
            self._core.observe(recorder, self._totals)

    def span(self, name: str, begin: int, **args: Any) -> None:
        """Records that the thread did something from `begin` until now; nothing when off."""
        if self.recorder is None:
            return
        self.spans_dropped += len(self.spans) == self.spans.maxlen
        self.spans.append(Span(name, begin, clock.now(), threading.get_native_id(), args))


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Gives this thread's calls in the block a name."""
    calls.name = name
    try:
        yield
    finally:
        calls.name = None


def note_background_thread() -> None:
    """Notes that this thread waits for calls on behalf of others."""
    background.add(threading.get_native_id())
