"""Starts the reductions of a step's gradients."""

from __future__ import annotations

import torch

from gradwire._calls.work import Work
from gradwire._communicator import Communicator
from gradwire._feedback import ErrorFeedback
from gradwire.torch._step.buckets import round_into
from gradwire.torch._step.residual_state import Call


class RoundedWork:
    """The work of a call whose averages are then rounded to the gradients' own type."""

    def __init__(self, work: Work, call: Call) -> None:
        self._work, self._call = work, call

    def wait(self) -> None:
        """Waits for the call and rounds its averages; raises the call's error."""
        self._work.wait()
        for gradient, average in zip(self._call.rounded, self._call.arrays, strict=True):
            round_into(gradient, average)


def average(
    communicator: Communicator, algorithm: str, feedback: ErrorFeedback | None, call: Call
) -> Work | RoundedWork:
    """Starts the average of a call's arrays over all ranks, in place."""
    op = "avg"
    if call.arrays[0].dtype is torch.float16:  # divide first: the sum may overflow
        op = "sum"
        for each in call.arrays:
            each.mul_(1 / communicator.size)
    work: Work = communicator.all_reduce(
        call.arrays[0] if len(call.arrays) == 1 else call.arrays,
        op=op,
        algorithm=algorithm,
        codec=call.codec,
        keys=call.keys,
        feedback=False if call.keys is None else feedback,
        async_op=True,
    )
    return RoundedWork(work, call) if call.rounded else work
