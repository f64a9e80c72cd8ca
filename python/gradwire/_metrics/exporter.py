"""What all communicators of this process have counted, and where GRADWIRE_METRICS shows it.

One port or file a process: the first communicator opens it, and it stays until the program ends.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire import _core
from gradwire._base import environment
from gradwire._bootstrap.mesh import Mesh
from gradwire._metrics.source import Source
from gradwire._metrics.text import Key, Labels, render, total, with_ratios

if TYPE_CHECKING:
    from gradwire._metrics.places import File, Port

_log = logging.getLogger("gradwire")
_VARIABLE = "GRADWIRE_METRICS"


class _Exporter:
    """Adds up sources, and shows the sums."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Source] = []
        self._released: deque[Source] = deque()
        self._ended: dict[Key, float] = {}  # the sums of communicators that have ended
        self._failed = False
        self.place: Port | File | None = None

    def add(self, source: Source) -> None:
        """Counts one more communicator."""
        with self._lock:
            self._open.append(source)
            self._ended |= source.info(_version())

    def release(self, source: Source) -> None:
        """Keeps only the sums of a communicator that has ended.

        The garbage collector may call it in any thread, also in one that has the lock.
        """
        self._released.append(source)
        if self._lock.acquire(blocking=False):
            try:
                self._add_released()
            finally:
                self._lock.release()

    def text(self, more: Labels = ()) -> str:
        """All of it as Prometheus reads it, with `more` labels."""
        with self._lock:
            self._add_released()
            ended, sources = {**self._ended}, [*self._open]
        # Without the lock: a communicator may be collected here, which takes its time.
        samples = total([ended, *(each.samples() for each in sources)])
        return render(with_ratios(samples), more)

    def _add_released(self) -> None:
        while self._released:
            source = self._released.popleft()
            if source in self._open:
                self._open.remove(source)
                self._failed |= source.failed
                self._ended = total((self._ended, source.samples(ended=True)))

    def end(self) -> None:
        """Closes the port; removes the file, unless it tells of a failure."""
        if self.place is not None:
            failed = self._failed or any(each.failed for each in self._open)
            self.place.end(failed)


_making = threading.Lock()
_exporter: _Exporter | None = None


def count(core: _core.Communicator, mesh: Mesh, owner: Any) -> Source | None:
    """Counts a new communicator's calls, if GRADWIRE_METRICS is set."""
    global _exporter
    if environment.text(_VARIABLE) is None:
        return None
    source = Source(core, mesh, owner)
    with _making:
        first = _exporter is None
        if _exporter is None:
            _exporter = _Exporter()
        _exporter.add(source)
        if first:
            _exporter.place = _opened(_exporter, mesh)
    return source


def release(source: Source | None) -> None:
    """Keeps the sums of a communicator that has ended."""
    if source is not None and _exporter is not None:
        _exporter.release(source)


def text() -> str:
    """What this process shows; empty where it counts nothing."""
    return "" if _exporter is None else _exporter.text()


def end() -> None:
    """Shows nothing any more, at the end of the program."""
    global _exporter
    with _making:
        ended, _exporter = _exporter, None
    if ended is not None:
        ended.end()


def _opened(exporter: _Exporter, mesh: Mesh) -> Port | File | None:
    """The port or file; None, with a warning, where it cannot be had: training goes on."""
    from gradwire._metrics.places import File, Port

    where = environment.endpoint(_VARIABLE)
    try:
        if isinstance(where, str):
            # In a folder that jobs share, neither files nor series of one are another's.
            run = f"{mesh.job.tag:016x}"
            name = f"gradwire-{mesh.job.name}-{run}-rank{mesh.job_rank(mesh.rank)}.prom"
            place: Port | File = File(Path(where), name, lambda: exporter.text((("run", run),)))
        else:
            host, port = where
            place = Port(host, port and port + _local_rank(mesh), exporter.text)
    except (OSError, OverflowError) as error:
        _log.warning(
            "%s=%s: rank %d shows no metrics: %s",
            *(_VARIABLE, environment.text(_VARIABLE), mesh.rank, error),
        )
        return None
    _log.info("rank %d: metrics at %s", mesh.rank, place)
    return place


def _local_rank(mesh: Mesh) -> int:
    """This process's number on its host: the launcher's, or else among the ranks of the host."""
    given = environment.local_rank()
    return mesh.hosts[: mesh.rank].count(mesh.hosts[mesh.rank]) if given is None else given


def _version() -> str:
    from gradwire._base.packages import installed

    return installed("gradwire") or ""


def _forget() -> None:
    """Forgets, in a forked child, what its parent counts."""
    global _exporter, _making
    _making = threading.Lock()
    if _exporter is not None and _exporter.place is not None:
        _exporter.place.forget()
    _exporter = None


os.register_at_fork(after_in_child=_forget)
