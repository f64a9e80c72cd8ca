"""Names of calls, and threads in the background, which do not count as the program's waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_next = threading.local()
background: set[int] = set()  # numbers of threads that wait for calls on behalf of others


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Gives this thread's calls in the block a name: lines, of which the first is the title."""
    _next.name = name
    try:
        yield
    finally:
        _next.name = None


def current() -> str | None:
    """The name of this thread's calls."""
    return getattr(_next, "name", None)


def note_background_thread() -> None:
    """Notes that this thread waits for calls on behalf of others."""
    background.add(threading.get_native_id())
