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

from gradwire._errors import InvalidArgument
from gradwire.torch.backend import cpp_holders
from gradwire.torch.exchange.completions import Completions, error_of

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


class Owner(Protocol):
    """One rank's end of a process group."""

    def completions(self, purpose: str) -> Completions:
        """The threads that complete futures, in turn for each purpose."""

    def explained(self, error: Exception) -> Exception:
        """The error of an operation, with what the group knows of its cause."""


class Operation(dist.Work):  # type: ignore[misc]
    """One operation of a process group; its results are in place once `wait` has returned.

    Those on a GPU are in place for the stream that was current in `wait`. A future handed out
    before is then complete, as is one that is asked for later: DDP's reducer relies on it.
    """

    def __init__(
        self,
        work: Waited,
        results: Sequence[torch.Tensor],
        owner: Owner,
        stream: ResultStream | None = None,
        purpose: str = "group",
    ) -> None:
        """Takes the work of a call to `owner`; `stream` is that of results on a GPU.

        Its future completes in turn with those of the same purpose.
        """
        super().__init__()
        cpp_holders.release()
        self.work, self.results, self._owner = work, list(results), owner
        self.stream, self._purpose = stream, purpose
        self._lock = threading.Lock()
        self._future: Any = None
        self._told: threading.Event | None = None  # the future is complete
        self._over = isinstance(work, Done)

    def __del__(self, keep: Callable[[Any], None] = cpp_holders.keep) -> None:
        keep(self)

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Blocks until the results are there; raises gradwire's error, at every call."""
        try:
            self._wait(timeout.total_seconds() or None)
        finally:
            self._end_wait()
        return True

    def _wait(self, timeout: float | None = None) -> Any:
        """Blocks until the results are there, and no longer than `timeout` seconds."""
        try:
            return self.work.wait(timeout)
        except InvalidArgument as error:
            raise self._owner.explained(error) from None

    def _end_wait(self) -> None:
        """Waits for the future, unless it was the timeout that ended the wait for the results."""
        if not self.work.done():
            return
        with self._lock:
            self._over = True
        if self._told is not None:
            self._told.wait()

    def synchronize(self) -> None:
        """Blocks as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is over, successfully or with an error.

        Its results are then in place, as those of torch's own backends are.
        """
        if not self.work.done():
            return False
        self.exception()  # copies results that are not in place yet
        self._over = True
        return True

    def is_success(self) -> bool:
        """Whether the operation is over and its results are there."""
        return self.work.done() and self.exception() is None

    def exception(self) -> Exception | None:
        """The operation's error once it is over, or None."""
        return error_of(self._wait) if self.work.done() else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation writes."""
        self.wait()
        return self.results

    def get_future(self) -> Any:
        """A future of the tensors that the operation writes; the same one at every call."""
        with self._lock:
            if self._future is not None:
                return self._future
            made: Any = Future(devices=None if self.stream is None else [self.stream.stream.device])
            self._future, self._told = made.then(_value), (told := threading.Event())
            self._future.then(lambda _: told.set())  # before what the program adds
        self._submit(lambda error: self._complete(made, error))
        return self._future

    def _submit(self, finish: Callable[[Exception | None], None]) -> None:
        """Calls `finish` when the operation is over: at once where that is known or on a stream.

        Otherwise a thread calls it.
        """
        if self.stream is not None and self.stream.enqueued:
            with torch.cuda.stream(self.stream.stream):
                error = error_of(self._wait)
            finish(error)
        elif self._over:
            finish(error_of(self._wait))
        else:
            self._owner.completions(self._purpose).submit(self._wait, finish)

    def _complete(self, future: Any, error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
        elif self.stream is None:
            future.set_result(self.results)
        else:  # whoever waits for the future waits for what is on the stream now
            with torch.cuda.stream(self.stream.stream):
                future.set_result(self.results)
        cpp_holders.release()  # perhaps this operation


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
        owner: Owner,
        stream: ResultStream | None = None,
    ) -> None:
        """Takes the receive, and the work that it is part of."""
        super().__init__(work, results, owner, stream)
        self._receive = receive

    def source_rank(self) -> int:
        """The rank that sent the message."""
        return int(self._wait())

    _source_rank = source_rank

    def _submit(self, finish: Callable[[Exception | None], None]) -> None:
        # Futures complete in turn, and the message may depend on a later one's.
        self._receive.when_matched(lambda: Operation._submit(self, finish))


def _value(future: Any) -> Any:
    """Raises the future's error, so that torch's C++ side sees an error instead of a value."""
    return future.value()
