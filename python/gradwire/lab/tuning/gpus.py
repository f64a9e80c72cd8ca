"""Measurement of the cost model of GPUs: launches, groups of messages, links and kernels.

The same fit as for CPUs (`fit`), to calls that are enqueued on a stream one after the other. What
the host takes for a call and for the groups of its rounds, and the device for its kernels, comes
out as ``call`` and ``round``; links as ``within.`` and ``between.``; kernels as ``move``, ``gamma``
and the codecs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

from gradwire import _core, _model
from gradwire._base.group import Group
from gradwire._errors import InvalidArgument
from gradwire.lab.tuning import measure
from gradwire.lab.tuning.fit import PingTimer, Progress, Timing, coded_case
from gradwire.lab.tuning.measure import Case

_SIZES = (4, 64 << 10, 1 << 20, 16 << 20)
_ALGORITHMS = ("direct", "ring", "recursive_doubling", "halving_doubling", "binary_tree")
_OF_TWO_RANKS = ("direct", "binary_tree")  # the others are one of these then
_CODECS = ("fp16", "bf16", "int8", "int4", "onebit", "threshold", "topk")
_POLL_SECONDS = 1e-5


def tune(
    comm: Group, device: int, *, seconds: float, progress: Progress | None
) -> tuple[_core.CostModel, list[Timing]]:
    """Measures and fits a model of the ranks' GPUs; returns it, and on rank 0 its timings.

    Every rank calls it, with the number of its GPU. It takes about `seconds`, and a few more on
    rank 0 to compute. Raises InvalidArgument.
    """
    timer = _GpuStopwatch(comm, device, seconds, progress)
    packed, timings = timer.fit(_cases(comm.size), _core.gpu_model(), most_message=math.inf)
    return _model.for_gpus(json.loads(packed)), timings


def own_device(comm: Group) -> int:
    """The number of this rank's GPU: ranks of a host take one after the other.

    Raises InvalidArgument where there is none.
    """
    info = _core.cuda_info()
    if not info["devices"]:
        raise InvalidArgument(f"tune --gpus: there is no GPU: {info['why_not']}")
    own = next(host for host in comm.hosts if comm.rank in host)
    return own.index(comm.rank) % len(info["devices"])


def _cases(ranks: int) -> list[Case]:
    """Small sizes first: they tell which large ones would take too long."""
    algorithms = _ALGORITHMS if ranks > 2 else _OF_TWO_RANKS
    plain = [
        measure.case_of_bytes(size, ranks, collective="all_reduce", algorithm=algorithm)
        for size in _SIZES
        for algorithm in algorithms
    ]
    return [*plain, *map(coded_case, _CODECS)]


class _GpuStopwatch(PingTimer):
    """Times calls on this rank's GPU."""

    def __init__(self, comm: Group, device: int, seconds: float, progress: Progress | None) -> None:
        self._device = device
        super().__init__(comm, seconds, progress)

    def _make_room(self) -> None:
        self._stream = _core.CudaStream(self._device)
        self._memory = _core.CudaMemory(self._device, max(_SIZES))
        self._end = _core.CudaEvent(self._device)

    def _call(self, case: Case) -> Callable[[], object]:
        array = _Zeros(self._memory, case.count, self._stream.handle)
        options: dict[str, Any] = {"algorithm": case.algorithm, "codec": case.codec}
        if _core.Codec(case.codec).biased:
            options["feedback"] = False
        return lambda: self._comm.all_reduce(array, **options)

    def _finish(self) -> None:
        self._end.record(self._stream.handle)
        while not self._end.done():
            time.sleep(_POLL_SECONDS)


class _Zeros:
    """Float32 elements of a GPU's memory, on a stream."""

    def __init__(self, memory: _core.CudaMemory, count: int, stream: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (memory.address, False),
            "version": 3,
            "stream": stream,
        }
