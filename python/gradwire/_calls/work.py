"""Work: an operation that goes on in the background."""

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
    """What a call with ``async_op=True`` returns. Made by the communicator.

    The arrays of the call belong to the operation until it is over: neither read what is written
    nor change what is read. They stay in memory even when the Work is dropped.
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
        """`result` is called by wait(). A Work that is dropped before that goes to `dropped`."""
        self._communicator, self._core, self._name, self._result = communicator, core, name, result
        self._dropped = dropped

    def done(self) -> bool:
        """Whether the operation is over, well or with an error."""
        return self._core.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the operation is over; returns what the synchronous call would return.

        Raises the operation's error, at every call. Raises Timeout after `timeout` seconds; then
        the operation goes on, and wait() may be called again. None waits as long as the operation's
        own timeout lets it run.
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
    """Of arrays on a GPU. It is over when the GPU has done it; nothing here waits for that."""

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
        """Whether the GPU has done it."""
        return self._event.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Lets the caller's current streams wait for it; returns the result, which comes after.

        Raises the communicator's failure if that is known. `timeout` has no meaning: the host does
        not wait.
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
    """Does what the Works that are over have left to do, as if they had been waited for.

    A codec in Python decodes on its callers' threads, and a rank that does not wait must end with
    the residuals that it would have.
    """
    for _ in range(len(dropped)):
        with contextlib.suppress(IndexError):  # another thread was faster
            work = dropped.popleft()
            if not work.done():
                dropped.append(work)
                continue
            with contextlib.suppress(Exception):  # whoever dropped it does not ask
                work.wait()
