"""What calls from Python take on GPUs: two processes on one GPU.

A stage of bench/gpu.py. Ranks exchange messages over NCCL where it lets ranks share a GPU, else by
way of the host; they also try NCCL communicators that block (GRADWIRE_NCCL_BLOCKING), for
which NCCL starts no thread for each group. `host_seconds` is the time until a call returns,
`seconds` that between two results, and `launches` the kernels and copies of one call, NCCL's among
them. NCCL's own all_reduce, as algorithm="nccl", is what the others are compared with.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any, NamedTuple

import gradwire
import torch

from tests.gpu import arrays
from tests.gpu.ranks import nccl_version, prepare
from tests.gpu.rows import Row, tell

sys.path.append(str(arrays.SUPPORT))
import ranks

BLOCKING = "nccl, blocking"
SIZES = (4, 1 << 20, 25 << 20)  # bytes
_TURNS, _CALLS = 3, 3


class Call(NamedTuple):
    """An all_reduce; codecs have error feedback."""

    algorithm: str
    codec: str = "none"

    def __str__(self) -> str:
        return self.algorithm if self.codec == "none" else f"{self.algorithm}, {self.codec}"


CALLS = (
    Call("ring"),
    Call("direct"),
    Call("direct", "fp16"),
    Call("direct", "onebit"),
    Call("direct", "onebit:block=8192"),
)


def main() -> int:
    """Prints the rows and times."""
    nccl = nccl_version()
    over_nccl = [("nccl", 2), (BLOCKING, 2)] if nccl else []
    for links, p in [("host", 2), *over_nccl]:
        with Row(f"times of calls over {links}", f"p={p}") as row:
            told = ranks.run(p, _times, links, nccl, transport="tcp", processes=True, timeout=30)
            for each in told[0]:
                tell(**each)
            row.expect(told[0], "nothing was timed")
    return 0


def _times(comm: gradwire.Communicator, links: str, nccl: str) -> list[dict[str, Any]]:
    """What this rank found, of each size and call."""
    os.environ["GRADWIRE_NCCL_BLOCKING"] = "1" if links == BLOCKING else "0"
    prepare(comm, links.partition(",")[0], nccl)
    torch.cuda.set_device(0)
    calls = CALLS if links == "host" else (Call("nccl"), *CALLS)
    return [time_call(comm, links, call, size) for size in SIZES for call in calls]


def time_call(comm: gradwire.Communicator, links: str, call: Call, size: int) -> dict[str, Any]:
    """What one call of `size` bytes takes, over `links`."""
    x = torch.ones(size // 4, device="cuda")
    feedback: Any = False if call.codec == "none" else gradwire.ErrorFeedback()

    def once() -> None:
        key = {"key": "x"} if feedback else {}
        comm.all_reduce(
            x, op="avg", algorithm=call.algorithm, codec=call.codec, feedback=feedback, **key
        )

    once()
    turns = [_turn(comm, once) for _ in range(_TURNS)]
    return {
        "call": str(call),
        "links": links,
        "p": comm.size,
        "bytes": size,
        "host_seconds": statistics.median(host for host, _ in turns),
        "seconds": statistics.median(total for _, total in turns),
        "launches": _launches(once),
    }


def _turn(comm: gradwire.Communicator, once: Any) -> tuple[float, float]:
    """Seconds of a call, until it returns and until its result is there."""
    torch.cuda.synchronize()
    comm.barrier()
    begun = time.perf_counter()
    for _ in range(_CALLS):
        once()
    returned = time.perf_counter()
    torch.cuda.synchronize()
    return (returned - begun) / _CALLS, (time.perf_counter() - begun) / _CALLS


def _launches(once: Any) -> int | None:
    """Kernels, copies and fills of one call; None where torch's profiler sees no GPU."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=activities) as profile:
            once()
            torch.cuda.synchronize()
    except RuntimeError:
        return None
    return sum(
        each.device_type == torch.autograd.DeviceType.CUDA for each in profile.events() or ()
    )


if __name__ == "__main__":
    sys.exit(main())
