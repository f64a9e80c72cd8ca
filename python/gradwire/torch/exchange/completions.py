"""Completions: threads that wait for operations and then complete their futures.

The communicator's own thread cannot do this: a future's callbacks are Python code that runs where
the future is completed, and may block on a later operation, as torch's PowerSGD hook does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from gradwire._trace.track import note_background_thread


class _Task(NamedTuple):
    wait: Callable[[], object]
    finish: Callable[[Exception | None], None]


class Completions:
    """Waits for one communicator's operations in the order they were submitted.

    One thread at a time waits; callbacks begin in that order and may overlap. Before a thread calls
    back it makes sure that another can take its turn, so there are as many threads as callbacks
    that block, and one or two more. They are daemons, but one that comes back from C++ while the
    interpreter shuts down would end the process badly: `close` them first.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._lock = threading.Lock()  # for everything below
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads that wait for an operation, or for their turn to
        self._pending = 0

    @property
    def pending(self) -> int:
        """The number of submitted operations that are not over."""
        return self._pending

    @property
    def threads(self) -> int:
        """The number of threads."""
        return len(self._threads)

    def submit(
        self, wait: Callable[[], object], finish: Callable[[Exception | None], None]
    ) -> None:
        """Calls `wait()` and then `finish(error)`, with its exception or None, on a thread."""
        with self._lock:
            self._pending += 1
            if self._free == 0:
                self._add_thread()
        self._tasks.put(_Task(wait, finish))

    def close(self, timeout: float) -> None:
        """Ends the threads after all submitted operations; joins each, up to `timeout` seconds."""
        self._tasks.put(None)
        for thread in self._threads:  # a thread adds its successor before it ends
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _add_thread(self) -> None:
        self._free += 1
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        note_background_thread()
        while self._finish_next():
            pass

    def _finish_next(self) -> bool:
        with self._turn:
            task = self._tasks.get()
            if task is None:
                self._tasks.put(None)  # for the next thread
                return False
            error = error_of(task.wait)
        with self._lock:
            self._pending -= 1  # before the callback, whose caller may close at once
            self._free -= 1
            if self._free == 0:
                self._add_thread()
        try:
            task.finish(error)
        finally:
            with self._lock:
                self._free += 1
        return True


def error_of(wait: Callable[[], object]) -> Exception | None:
    """The exception that a call raises; None without one."""
    try:
        wait()
    except Exception as error:
        return error
    return None
