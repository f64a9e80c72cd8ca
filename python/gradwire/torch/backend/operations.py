"""Operations: gradwire's works as torch.distributed takes them, with futures.

A future that holds an exception must not reach torch's C++ side as it is: DDP's reducer would read
the exception as tensors. So futures are passed on by `then`, whose callback raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.torch._step.completions import Completions, error_of

_FOREVER = timedelta(0)  # torch's default of wait(): as long as the operation's own timeout


class Waited(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Whether it is over, successfully or with an error."""

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until it is over; raises its error."""


class Done:
    """An operation that was over before it was asked for."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Returns at once."""


class Several:
    """Operations that were begun one after the other, as one."""

    def __init__(self, works: Sequence[Waited]) -> None:
        self._works = works

    def done(self) -> bool:
        """Whether all are over."""
        return all(each.done() for each in self._works)

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until all are over, each at most `timeout` seconds; raises the first error."""
        for each in self._works:
            each.wait(timeout)


class Finished:
    """A work with something to do once, on the first thread that finds it over."""

    def __init__(self, work: Waited, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether the work is over, successfully or with an error."""
        return self._work.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the work is over and finished; returns its result, or raises its error."""
        result = self._work.wait(timeout)
        with self._lock:
            if self._finish is not None:
                self._finish()
            self._finish = None
        return result


class ResultStream(NamedTuple):
    """The CUDA stream on which an operation's results come to be."""

    stream: torch.cuda.Stream
    enqueued: bool  # the whole operation is on streams already, and no thread waits for it


class Operation(dist.Work):  # type: ignore[misc]
    """One operation of a process group; its results are in place once `wait` has returned.

    Those on a GPU are in place for the stream that was current in `wait`.
    """

    def __init__(
        self,
        work: Waited,
        results: Sequence[torch.Tensor],
        completions: Callable[[], Completions],
        stream: ResultStream | None = None,
    ) -> None:
        """Takes the work, and what gives the threads on which a future completes.

        `stream` is that of results on a GPU.
        """
        super().__init__()
        self.work, self.results, self._completions = work, list(results), completions
        self.stream = stream
        self._lock = threading.Lock()
        self._future: Any = None

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Blocks until the results are there; raises gradwire's error, at every call."""
        self.work.wait(timeout.total_seconds() or None)
        return True

    def synchronize(self) -> None:
        """Blocks as `wait` does."""
        self.work.wait()

    def is_completed(self) -> bool:
        """Whether the operation is over, successfully or with an error.

        Its results are then in place, as those of torch's own backends are.
        """
        if not self.work.done():
            return False
        self.exception()  # copies results that are not in place yet
        return True

    def is_success(self) -> bool:
        """Whether the operation is over and its results are there."""
        return self.work.done() and self.exception() is None

    def exception(self) -> Exception | None:
        """The operation's error once it is over, or None."""
        if self.work.done():
            try:
                self.work.wait()
            except Exception as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation writes."""
        self.work.wait()
        return self.results

    def get_future(self) -> Any:
        """A future of the tensors that the operation writes; the same one at every call."""
        with self._lock:
            if self._future is not None:
                return self._future
            made: Any = Future(devices=None if self.stream is None else [self.stream.stream.device])
            self._future = made.then(_value)
        self._submit(lambda error: self._complete(made, error))
        return self._future

    def _submit(self, finish: Callable[[Exception | None], None]) -> None:
        """Has a thread call `finish` when the operation is over; at once if it is on a stream."""
        if self.stream is None or not self.stream.enqueued:
            self._completions().submit(self.work.wait, finish)
            return
        with torch.cuda.stream(self.stream.stream):
            error = error_of(self.work.wait)
        finish(error)

    def _complete(self, future: Any, error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
        elif self.stream is None:
            future.set_result(self.results)
        else:  # whoever waits for the future waits for what is on the stream now
            with torch.cuda.stream(self.stream.stream):
                future.set_result(self.results)


class Matched(Waited, Protocol):
    """A receive under way."""

    def when_matched(self, call: Callable[[], None]) -> None:
        """Calls back once a message has begun to come, or the receive has failed."""


class Received(Operation):
    """One receive, which knows its sender once it is over."""

    def __init__(
        self,
        receive: Matched,
        work: Waited,
        results: Sequence[torch.Tensor],
        completions: Callable[[], Completions],
        stream: ResultStream | None = None,
    ) -> None:
        """Takes the receive, and the work that it is part of."""
        super().__init__(work, results, completions, stream)
        self._receive = receive

    def source_rank(self) -> int:
        """The rank that sent the message."""
        return int(self.work.wait())

    _source_rank = source_rank

    def _submit(self, finish: Callable[[Exception | None], None]) -> None:
        # Futures complete in turn, and the message may depend on a later one's.
        self._receive.when_matched(lambda: Operation._submit(self, finish))


def _value(future: Any) -> Any:
    """Raises the future's error, so that torch's C++ side sees an error instead of a value."""
    return future.value()
