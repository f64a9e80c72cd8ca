"""CpuCalls: calls with arrays on the CPU, and the cache by which a repeated call skips checks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradwire import _core
from gradwire._arrays import shapes
from gradwire._arrays.buffers import Buffers, Place
from gradwire._arrays.operands import written
from gradwire._calls import reductions, scaling, work
from gradwire._calls.options import Options
from gradwire._calls.reductions import PreparedCall
from gradwire._calls.requests import request_of
from gradwire._calls.work import Work
from gradwire._trace import names

# Types of options whose values can be compared by identity.
_IMMUTABLE = {str, int, float, bool, type(None)}


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
        self.clear_cache()

    def clear_cache(self) -> None:
        """Clears the cache of repeated calls, whose plans contain choices of the cost model."""
        self._cache = _core.CallCache(self._core, self.dropped)

    @property
    def call_cache(self) -> object:
        """The cache as methods with a fast path need it; a new object after `clear_cache`."""
        return self._cache.capsule

    def finish_dropped(self) -> None:
        """Finishes Works that were dropped without wait()."""
        work.finish(self.dropped)

    def run(self, name: str, buffers: Buffers, options: Options, timeout: float) -> Any:
        """Makes a call; returns its result, or a Work. `timeout` is the default, in seconds."""
        buffers = scaling.prescaled(name, buffers, options)
        call = reductions.prepare(name, buffers, options, self._place)
        call = scaling.postscaled(call, options)
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
        shape = shapes.text_of(call.name, buffers, options.check)
        if shape is not None:
            request.check_shape(shape, options.check == "shape")
        if (name := names.current()) is not None:
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
