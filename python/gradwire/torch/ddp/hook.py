"""The DDP communication hook.

DDP calls the hook once per bucket, in the same order on every rank, on the thread that runs
backward, and goes on with backward while earlier buckets travel. With a hook, DDP leaves the
division by the number of ranks to it. (Li et al. 2020, "PyTorch Distributed", sec. 3.2)

Torch's futures turn every error into a RuntimeError. So the hook has autograd call it back at the
end of backward, just before DDP waits for the futures: backward passes on an error raised there
unchanged.
"""
# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.

import contextlib

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future

from gradwire._errors import InvalidArgument
from gradwire.torch.ddp.state import State


def comm_hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over all ranks, in place; for `ddp.register_comm_hook(state, comm_hook)`.

    Returns a future of the bucket's buffer at once; several buckets may be in flight. Raises
    InvalidArgument for a `state` of another type, and nothing else: backward would end before they
    are over. Errors are in the future and in `state.error`, and the end of backward raises them.
    """
    if not isinstance(state, State):  # no bucket is in flight then
        raise InvalidArgument(
            f"gradwire's comm_hook was registered with {type(state).__name__} in place of a State: "
            "call gradwire.torch.register(ddp), which makes one"
        )
    buffer = bucket.buffer()
    # Without its device, the future of a bucket on a GPU would complete before the bucket.
    future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    averaged = future.then(_value)
    state._steps.submit_bucket(bucket, future)
    if bucket.is_last():
        with contextlib.suppress(RuntimeError):  # called outside of backward: the future must do
            Variable._execution_engine.queue_callback(state._steps.end_backward)
    return averaged


def _value(future: Future[torch.Tensor]) -> torch.Tensor:
    """Raises the future's error, so that torch's C++ side sees an error instead of a value."""
    return future.value()
