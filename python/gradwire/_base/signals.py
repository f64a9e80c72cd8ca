"""Handlers of signals for a while."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def handled(numbers: Sequence[int], handler: Callable[[int, object], object]) -> Iterator[None]:
    """Has a handler called for these signals during the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = [signal.signal(each, handler) for each in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)
