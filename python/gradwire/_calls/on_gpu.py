"""Calls with arrays on a GPU, which are enqueued on a stream, and their Work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire import _core
from gradwire._arrays import cuda_arrays
from gradwire._arrays.buffers import Buffers, Place, require_one_on_gpu
from gradwire._arrays.operands import Operand, written
from gradwire._base.arguments import seconds
from gradwire._calls.gpus import Gpu
from gradwire._calls.on_cpu import Work
from gradwire._calls.requests import Options, prepare, request_of, require_none_on_gpu
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
    require_none_on_gpu(options)
    require_one_on_gpu(name, given)
    call = prepare(name, given, options, place, on_gpu=True)
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
