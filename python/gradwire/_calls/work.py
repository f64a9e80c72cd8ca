"""Work: an operation in the background."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gradwire import _core
from gradwire._arrays import cuda_arrays
from gradwire._arrays.operands import Operand
from gradwire._base.arguments import seconds
from gradwire._calls.gpus import Gpu


class Work:
    """An operation in the background, which calls with ``async_op=True`` return.

    The call's arrays belong to the operation until it is over: do not read its outputs nor change
    its inputs. They stay in memory even when the Work is dropped.
    """

    __slots__ = ("_communicator", "_core", "_dropped", "_name", "_result")

    def __init__(
        self,
        communicator: _core.Communicator,
        core: _core.Work,
        name: str,
        result: Callable[[], Any],
        dropped: deque[Work] | None = None,
    ) -> None:
        """Takes a core Work; wait() returns `result()`. A Work dropped before goes to `dropped`."""
        self._communicator, self._core, self._name, self._result = communicator, core, name, result
        self._dropped = dropped

    def done(self) -> bool:
        """Whether the operation is over, successfully or with an error."""
        return self._core.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the operation is over; returns the result of the synchronous call.

        Raises the operation's error, at every call. Raises Timeout after `timeout` seconds; the
        operation then goes on, and wait() may be called again. None waits for the operation's own
        timeout.
        """
        try:
            self._communicator.wait(self._core, math.inf if timeout is None else seconds(timeout))
            return self._result()
        finally:
            if self.done():
                self._dropped = None

    def __del__(self) -> None:
        if self._dropped is not None:
            self._dropped.append(self)

    def __repr__(self) -> str:
        return f"<Work {self._name} {'done' if self.done() else 'in flight'}>"


class GpuWork(Work):
    """The Work of a call on a GPU: it is over when the GPU is done, and the host never waits."""

    __slots__ = ("_arrays", "_event", "_gpu")

    def __init__(
        self,
        gpu: Gpu,
        event: _core.CudaEvent,
        name: str,
        result: Callable[[], Any],
        arrays: Sequence[Operand],
    ) -> None:
        self._gpu, self._event, self._name, self._result = gpu, event, name, result
        self._arrays, self._dropped = arrays, None

    def done(self) -> bool:
        """Whether the GPU has finished the operation."""
        return self._event.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Makes the caller's current streams wait; returns the result, for use on these streams.

        Raises the communicator's failure if that is known. `timeout` has no effect, since the host
        does not wait.
        """
        if timeout is not None:
            seconds(timeout)
        self._gpu.require_alive()
        for stream in cuda_arrays.streams_of(
            (each.array for each in self._arrays), self._gpu.device
        ):
            self._event.wait(stream)
        return self._result()


def finish(dropped: deque[Work]) -> None:
    """Finishes dropped Works that are over, as wait() would have.

    A codec in Python decodes on its callers' threads, and a rank that never waits must end with the
    same residuals.
    """
    for _ in range(len(dropped)):
        with contextlib.suppress(IndexError):  # another thread took it
            work = dropped.popleft()
            if not work.done():
                dropped.append(work)
                continue
            with contextlib.suppress(Exception):  # nobody waits for its error
                work.wait()
