"""Ranks that map each other's memory, two and four processes on one GPU: bits, times, a dead rank.

A stage of bench/gpu.py. Beside the times of `ipc` stand those of NCCL's own all_reduce, where NCCL
lets ranks share a GPU, and those by way of the host. Processes share a GPU by turns, so these are
times of the turns rather than of links: they tell how often a call waits.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

import gradwire
import numpy as np

from bench.cuda import gpu_arrays, gpu_ranks
from bench.cuda.gpu_rows import Row, tell

sys.path.append(str(gpu_arrays.TESTS))
import ranks

_LENGTHS = (1, 1001, 300_001)  # of one shot and of two
_SMALL = (1, 1001, 5001)
_TIMED = ("none", "fp16", "int8", "onebit")
_CODECS = (*_TIMED, "onebit:block=8192")


def main() -> int:
    """Prints the rows and times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", action="store_true")
    simulated = parser.parse_args().simulated
    nccl = "" if simulated else gpu_ranks.nccl_version()
    for p in (2, 4):
        with Row("mapped memory, beside CPUs", f"p={p}") as row:
            setting: dict[str, Any] = {"transport": "tcp", "processes": True, "timeout": 30}
            told = ranks.run(p, _body, simulated, nccl, **setting)
            for each in told[0][1]:
                tell(**each)
            row.expect_none([each for wrong, *_ in told for each in wrong], sum(t[2] for t in told))
            if told[0][3]:
                row.note(told[0][3])
    gpu_ranks.check_fault("a killed rank", "ipc", 3, simulated, "")
    gpu_ranks.check("ipc", 2, simulated)
    return 0


def _body(
    comm: gradwire.Communicator, simulated: bool, nccl: str
) -> tuple[list[str], list[dict[str, Any]], int, str]:
    """What differs from CPUs, times, how many calls were compared, and what could not be timed."""
    gpu_ranks.prepare(comm, "ipc", "")
    os.environ.update(gpu_ranks.nccl_environment(comm.rank, nccl))
    place = gpu_arrays.place(simulated)
    with place.on_stream():
        lengths = _SMALL if simulated else _LENGTHS
        compared = [*_differences(comm, place, lengths)]
        found = [each for each in compared if each]
        if simulated:
            return found, [], len(compared), ""
        times, note = _times(comm, nccl)
    return found, times, len(compared), note


def _differences(
    comm: gradwire.Communicator, place: Any, lengths: tuple[int, ...]
) -> Iterator[str]:
    """For each call the empty text, or what its results differ in from those of CPUs."""
    for n in lengths:
        for codec in _CODECS:
            wish: dict[str, Any] = {"op": "avg", "algorithm": "direct", "codec": codec}
            wish["feedback"] = False
            on_cpu = np.random.default_rng([comm.rank, n]).standard_normal(n).astype(np.float32)
            on_gpu = place.put(on_cpu.copy())
            for _ in range(3):
                comm.all_reduce(on_cpu, **wish)
                comm.all_reduce(on_gpu, **wish)
            same = np.array_equal(place.get(on_gpu).view(np.uint32), on_cpu.view(np.uint32))
            yield "" if same else f"{n} elements, {codec}, rank {comm.rank}"
    assert comm._gpu is not None
    yield "" if comm._gpu.links == "ipc" else f"messages went over {comm._gpu.links}"


def _times(comm: gradwire.Communicator, nccl: str) -> tuple[list[dict[str, Any]], str]:
    """Those of mapped memory, then of NCCL and of the host, each on a communicator of its own."""
    from bench.cuda.gpu_call_times import SIZES, Call, time_call

    calls = {
        "ipc": (Call("ring"), *(Call("direct", codec) for codec in _TIMED)),
        "nccl": (Call("nccl"),),
        "host": (Call("direct"),),
    }
    found, note = [], "" if nccl else "there is no NCCL to compare with"
    for links in ("ipc", "nccl", "host") if nccl else ("ipc", "host"):
        os.environ["GRADWIRE_GPU_LINKS"] = links
        part = comm.split(0)
        assert part is not None
        try:
            found += [time_call(part, links, call, n) for n in SIZES for call in calls[links]]
        except gradwire.Error as error:
            if links != "nccl":
                raise
            note = f"NCCL does not let ranks share this GPU: {error}"
        finally:
            part.close()
    return found, note


if __name__ == "__main__":
    sys.exit(main())
