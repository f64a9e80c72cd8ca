"""The DDP communication hook.

DDP calls the hook once per bucket, in the same order on every rank, on the thread that runs
backward, and goes on with backward while earlier buckets travel. With a hook DDP does not divide
by the number of ranks: the average is the hook's. (Li et al. 2020, "PyTorch Distributed", sec. 3.2)

An error on its way through torch's futures becomes a RuntimeError. So the hook has autograd call it
back at the end of backward, just before DDP waits for the futures: what is raised there comes out
of backward as it is.
"""
# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.

import contextlib

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future

from gradwire._errors import InvalidArgument
from gradwire.torch._state import State


def comm_hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over all ranks, in place; for `ddp.register_comm_hook(state, comm_hook)`.

    Returns at once; several buckets may be on their way. Never raises, lest backward ends before
    they are over, but for a `state` that is none: errors are in the future and in `state.error`,
    and the end of backward raises them.
    """
    if not isinstance(state, State):  # nothing is on its way then
        raise InvalidArgument(
            f"gradwire's comm_hook was registered with {type(state).__name__} in place of a State: "
            "call gradwire.torch.register(ddp), which makes one"
        )
    buffer = bucket.buffer()
    # Without its device the future of a GPU's bucket would be complete before the bucket is.
    future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    averaged = future.then(_value)
    state._steps.hand_over(bucket, future)
    if bucket.is_last():
        with contextlib.suppress(RuntimeError):  # called outside of backward: the future remains
            Variable._execution_engine.queue_callback(state._steps.end_backward)
    return averaged


def _value(future: Future[torch.Tensor]) -> torch.Tensor:
    """Raises what the future holds, so that torch's C++ side sees an error and not a value."""
    return future.value()
