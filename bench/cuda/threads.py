"""Calls of two ranks that are threads on one GPU: bits beside CPUs, then times.

A stage of bench/gpu.py. Two processes on one GPU take turns of milliseconds, so only threads, whose
kernels run side by side, show what a call takes. Messages are copies on the device, where ranks of
two GPUs would use a link: a lower bound for these.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ |= {
    "GRADWIRE_GPU_LINKS": "loopback",
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}

import gradwire
import numpy as np

from bench.cuda.call_times import Call
from tests.gpu import arrays
from tests.gpu.rows import Row, tell

_LENGTHS = (1, 1001, 300_001)
_CODECS = ("none", "fp16", "int8", "onebit", "onebit:block=8192")
_TIMED = (*(Call("direct", codec) for codec in _CODECS[:4]), Call("ring"))
_SIZES = (4, 1 << 20, 25 << 20, 256 << 20)  # bytes
_TURNS, _CALLS = 3, 10
_RANKS = 2


def main() -> int:
    """Prints the row and times."""
    with Row("calls between threads", f"p={_RANKS}") as row:
        try:
            place = arrays.Cupy()
        except ImportError as error:
            row.skip(str(error))
            return 0
        told = gradwire.spawn(lambda comm: _compare(comm, place), _RANKS, threads=True, timeout=30)
        row.expect_none([each for found in told for each in found], len(_LENGTHS) * len(_CODECS))
        for each in gradwire.spawn(
            lambda comm: _times(comm, place), _RANKS, threads=True, timeout=30
        )[0]:
            tell(**each)
    return 0


def _compare(comm: gradwire.Communicator, place: arrays.Place) -> list[str]:
    """What differs from the same calls on CPUs."""
    wrong = []
    with place.on_stream():
        for n in _LENGTHS:
            for codec in _CODECS:
                x = np.random.default_rng([comm.rank, n]).standard_normal(n).astype(np.float32)
                y = place.put(x.copy())
                for each in (x, y, x, y):
                    comm.all_reduce(each, op="avg", algorithm="direct", codec=codec, feedback=False)
                if place.get(y).tobytes() != x.tobytes():
                    wrong.append(f"{n} elements, {codec}, rank {comm.rank}")
    return wrong


def _times(comm: gradwire.Communicator, place: arrays.Place) -> list[dict[str, object]]:
    """Of blocking calls, one after the other; medians of turns."""
    found = []
    with place.on_stream():
        for size in _SIZES:
            x = place.put(np.ones(size // 4, np.float32))
            for call in _TIMED:
                turns = [_turn(comm, place, x, call) for _ in range(1 + _TURNS)]
                seconds = statistics.median(total for _, total in turns[1:])
                host = statistics.median(host for host, _ in turns[1:])
                found.append(
                    {
                        "call": str(call),
                        "links": "loopback, threads",
                        "p": comm.size,
                        "bytes": size,
                        "host_seconds": host,
                        "seconds": seconds,
                        "launches": None,
                    }
                )
    return found


def _turn(
    comm: gradwire.Communicator, place: arrays.Place, x: object, call: Call
) -> tuple[float, float]:
    """Seconds of a call, until it returns and until its result is there."""
    place.wait()
    comm.barrier()
    begun = time.perf_counter()
    for _ in range(_CALLS):
        comm.all_reduce(x, op="avg", algorithm=call.algorithm, codec=call.codec, feedback=False)
    returned = time.perf_counter()
    place.wait()
    return (returned - begun) / _CALLS, (time.perf_counter() - begun) / _CALLS


if __name__ == "__main__":
    sys.exit(main())
