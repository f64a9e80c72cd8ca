"""Calls with arrays on the CPU, and the Work of those in the background.

A cache lets a repeated call skip checks.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gradwire import _core
from gradwire._arrays.buffers import Buffers, Place, shapes_text
from gradwire._arrays.operands import written
from gradwire._base.arguments import seconds
from gradwire._calls.requests import (
    Options,
    PreparedCall,
    postscaled,
    prepare,
    prescaled,
    request_of,
)
from gradwire._trace import track

# Types of options whose values can be compared by identity.
_IMMUTABLE = {str, int, float, bool, type(None)}


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


class CpuCalls:
    """Makes a communicator's calls with arrays on the CPU."""

    def __init__(
        self,
        core: _core.Communicator,
        place: Place,
        fast_paths: Mapping[str, _core.fast_path_method[Any, Any, Any]],
    ) -> None:
        """Takes the core and the methods with a fast path, all_reduce and barrier."""
        self._core, self._place, self._fast_paths = core, place, fast_paths
        self.dropped: deque[Work] = deque()
        self.nothing = np.empty(0, np.uint8)  # the array of a barrier

    def clear_cache(self) -> object:
        """Clears the cache of repeated calls, whose plans contain choices of the cost model.

        Returns the new one as methods with a fast path need it.
        """
        self._cache = _core.CallCache(self._core, self.dropped)
        return self._cache.capsule

    def finish_dropped(self) -> None:
        """Finishes dropped Works that are over, as wait() would have.

        A codec in Python decodes on its callers' threads, and a rank that never waits must end with
        the same residuals.
        """
        for _ in range(len(self.dropped)):
            with contextlib.suppress(IndexError):  # another thread took it
                work = self.dropped.popleft()
                if not work.done():
                    self.dropped.append(work)
                    continue
                with contextlib.suppress(Exception):  # nobody waits for its error
                    work.wait()

    def run(self, name: str, buffers: Buffers, options: Options, timeout: float) -> Any:
        """Makes a call; returns its result, or a Work. `timeout` is the default, in seconds."""
        buffers = prescaled(name, buffers, options)
        call = postscaled(prepare(name, buffers, options, self._place), options)
        try:
            begun = self._begin(call, buffers, options, timeout)
        except BaseException:
            if call.reduction is not None:
                closed = not self._core.owned_here or self._core.closed
                call.reduction.withdraw(failed=closed)
            raise
        return begun if options.async_op else call.finish()

    def _begin(
        self, call: PreparedCall, buffers: Buffers, options: Options, timeout: float
    ) -> Work | None:
        """Runs the call, or submits it."""
        request = request_of(call, options)
        shape = shapes_text(call.name, buffers, options.check)
        if shape is not None:
            request.check_shape(shape, options.check == "shape")
        if (name := track.calls.name) is not None:
            request.name(name)
        limit = options.limit(timeout)
        written(buffers.outputs)
        if not options.async_op:
            self._core.run(request, limit)
            self._cache_call(call, buffers, options, request, limit)
            self.finish_dropped()
            return None
        core = self._core.submit(request, limit, (buffers, request))
        dropped = self.dropped if call.is_late else None
        return Work(self._core, core, call.name, call.finish, dropped)

    def _cache_call(
        self,
        call: PreparedCall,
        buffers: Buffers,
        options: Options,
        request: _core.Request,
        timeout: float,
    ) -> None:
        """Caches the call if a repeated one with the same array cannot differ in anything."""
        inputs = buffers.inputs
        if len(inputs) != 1 or call.is_late or call.feedback is not None:
            return
        array: Any = inputs[0].array
        method = self._fast_paths["all_reduce"]
        in_place = call.name == "all_reduce" and buffers.outputs is inputs and not call.shapes
        if array is self.nothing:
            array, method = None, self._fast_paths["barrier"]
        elif not in_place or not _is_plain(array):
            return
        given = tuple(getattr(options, name, None) for name in method.names)  # out: none
        if set(map(type, given)) <= _IMMUTABLE:
            self._cache.add(method, array, given, request, timeout)


def _is_plain(array: object) -> bool:
    """Whether the array's type is known to the cache; subclasses may override calls."""
    torch = sys.modules.get("torch")
    known = (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor, torch.nn.Parameter)
    return type(array) in known
