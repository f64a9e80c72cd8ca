"""Calls with arrays on a GPU, which are enqueued on a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire._arrays import buffers
from gradwire._arrays.buffers import Buffers, Place
from gradwire._arrays.operands import written
from gradwire._calls import reductions, scaling
from gradwire._calls.gpus import Gpu
from gradwire._calls.options import Options
from gradwire._calls.requests import request_of
from gradwire._calls.work import GpuWork
from gradwire._errors import InvalidArgument

_COLLECTIVES = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast"),
    *("gather", "scatter", "all_to_all"),
)


def takes(name: str, *, prescale: float = 1.0) -> bool:
    """Whether a call of one array can be made on GPUs; `call_on_gpu` refuses the others."""
    return name in _COLLECTIVES and prescale == 1


def call_on_gpu(
    name: str,
    given: Buffers,
    options: Options,
    place: Place,
    device: int,
    gpu_of: Callable[[int], Gpu],
    timeout: float,
) -> Any:
    """Enqueues a collective of arrays on `device`; returns its result, or a Work.

    `gpu_of` returns this rank's GPU, which the first call sets up. `timeout` is the default, in
    seconds. Raises InvalidArgument for another GPU than that of the first call.
    """
    scaling.require_none_on_gpu(options)
    buffers.require_one_on_gpu(name, given)
    call = reductions.prepare(name, given, options, place, on_gpu=True)
    gpu, request = gpu_of(device), request_of(call, options)
    if device != gpu.device:
        raise InvalidArgument(
            f"the arrays are on cuda:{device}, and this rank works on cuda:{gpu.device} since "
            "its first call there: give each rank one GPU"
        )
    limit = options.limit(timeout)
    written(given.outputs)
    arrays = (*given.inputs, *given.outputs)
    if options.async_op:
        event = gpu.begin(request, call.feedback, arrays, limit)
        return GpuWork(gpu, event, name, call.finish, arrays)
    gpu.run(request, call.feedback, arrays, limit)
    return call.finish()
