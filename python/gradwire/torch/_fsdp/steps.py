"""ShardSteps: a backward's reductions, which are made one by one, and the end of each step.

FSDP calls where it would reduce, and on the CPU it waits there. A step ends when backward does, in
a callback of autograd's that follows FSDP's own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.autograd import Variable
from torch.autograd import graph as autograd

from gradwire._communicator import Communicator
from gradwire._errors import Aborted, Error, InvalidArgument
from gradwire.torch._step.repacking import Bucket
from gradwire.torch._step.residual_state import Call, ResidualState
from gradwire.torch._step.stats import Counters, Spent
from gradwire.torch._step.steps import without_traceback

_CLOSED = "the hook's State is closed: call register_fsdp() for the model again"

Vote = Callable[[torch.Tensor], object]  # reduces a flag to the least of some ranks', in place


class ShardSteps:
    """The steps of one model; the first error is final."""

    def __init__(
        self,
        communicator: Communicator,
        state: ResidualState,
        votes: Sequence[Vote],
        owned: Sequence[Communicator],
        *,
        passes: int,
    ) -> None:
        """`votes` make all ranks end a step alike; `owned` are the communicators to close.

        `passes` is how often a gradient's bytes travel in a ring: twice in an all_reduce, and once
        in a reduce_scatter.
        """
        self.communicator, self.state = communicator, state
        self._votes, self._owned = votes, owned
        self.error: Exception | None = None  # a copy that is never raised
        self.counters = Counters(communicator.size, passes)
        self.done = 0  # steps whose gradients were all averaged, without paused ones
        self.closed = False
        self._is_open = False
        self._task: int | None = None  # of autograd, in which the last step began
        self._buckets = self._bytes = 0
        self._spent = Spent()
        self._finite = True

    def reduce(self, bucket: Bucket, run: Callable[[Call], Iterable[torch.Tensor]]) -> None:
        """Makes a bucket's calls by `run`, which returns their results."""
        self.begin()
        before = self.communicator.traffic
        for call in self.state.calls(bucket, self.done):
            for result in run(call):
                self._finite = self._finite and bool(torch.isfinite(result).all())
        self._spent = self._spent.plus(self.communicator.traffic, before)
        self._buckets += 1
        self._bytes += sum(each.numel() * each.element_size() for each in bucket.whole)

    @contextlib.contextmanager
    def ending_on_failure(self) -> Iterator[None]:
        """Makes an error final, and tells the other ranks, whose calls this one will not make."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def abandon_step(self) -> None:
        """Undoes a step whose backward did not end."""
        if self._is_open:
            self._is_open = False
            self.state.end_step(False)

    def close(self, with_communicator: bool) -> None:
        """Undoes an unfinished step, and closes the communicators that are the hook's own."""
        self.closed = True
        self.abandon_step()
        if with_communicator:
            for each in self._owned:
                each.close()

    def _require_usable(self) -> None:
        if self.error is not None:
            raise without_traceback(self.error)
        if self.closed:
            raise Aborted(_CLOSED)

    def begin(self) -> None:
        """Begins the backward's step, if it has not begun; raises an earlier step's error.

        Raises InvalidArgument where it could not tell when the step ends.
        """
        self._require_usable()
        task = torch._C._current_graph_task_id()
        if self._is_open and task == self._task:
            return
        _require_whole_backward(task)
        self.abandon_step()  # an earlier backward raised
        self.state.open_step(self.state.scales.read())
        self._is_open, self._task = True, task
        self._buckets = self._bytes = 0
        self._spent, self._finite = Spent(), True
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        with self.ending_on_failure():
            kept = self.state.end_step(self._agree())
            self.counters.end_step(kept, self._buckets, self._bytes, self._spent)
            self.done += self.state.is_counted
            self._is_open = False

    def _agree(self) -> bool:
        """Whether all ranks' results are finite, if that decides over residuals."""
        if self.state.feedback is None or not self.state.is_counted:
            return self._finite
        flag = torch.tensor([self._finite], dtype=torch.uint8, device="cpu")
        for vote in self._votes:
            vote(flag)
        return bool(flag.item())

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            error = Aborted(f"{type(error).__name__} in backward")
        if self.error is None:
            self.error = without_traceback(error)
        if not (self.closed or self.communicator.closed):
            kind = "" if isinstance(error, Error) else f"{type(error).__name__}: "
            self.communicator.abort(f"{kind}{error}")


def _require_whole_backward(task: int) -> None:
    """Raises InvalidArgument outside of a backward, and in one that is a part of another."""
    if task == -1:
        raise InvalidArgument(
            "FSDP reduces gradients outside of a backward, as torch.distributed.pipelining has it "
            "do: register_fsdp() is for models that are trained by loss.backward()"
        )
    frame, backwards = sys._getframe(), 0
    while frame is not None:
        backwards += frame.f_code is autograd._engine_run_backward.__code__
        frame = frame.f_back  # type: ignore[assignment]
    if backwards > 1:
        raise InvalidArgument(
            "a backward runs within another one, as in checkpoint(..., use_reentrant=True): give "
            "use_reentrant=False"
        )
