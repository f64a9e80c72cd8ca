"""Work: an operation that goes on in the background."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gradwire import _core
from gradwire._errors import InvalidArgument


class Work:
    """What a call with ``async_op=True`` returns. Made by the communicator.

    The arrays of the call belong to the operation until it is over: neither read what is written
    nor change what is read. They stay in memory even when the Work is dropped.
    """

    __slots__ = ("_communicator", "_core", "_name", "_result")

    def __init__(
        self,
        communicator: _core.Communicator,
        core: _core.Work,
        name: str,
        result: Callable[[], Any],
    ) -> None:
        self._communicator, self._core, self._name, self._result = communicator, core, name, result

    def done(self) -> bool:
        """Whether the operation is over, well or with an error."""
        return self._core.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the operation is over; returns what the synchronous call would return.

        Raises the operation's error, at every call. Raises Timeout after `timeout` seconds; then
        the operation goes on, and wait() may be called again. None waits as long as the operation's
        own timeout lets it run.
        """
        self._communicator.wait(self._core, math.inf if timeout is None else seconds(timeout))
        return self._result()

    def __repr__(self) -> str:
        return f"<Work {self._name} {'done' if self.done() else 'in flight'}>"


def seconds(value: float) -> float:
    """The value, if it can be a timeout."""
    if not value > 0:
        raise InvalidArgument(f"timeout={value!r} is not a positive number of seconds")
    return float(value)
