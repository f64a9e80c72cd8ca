"""Steps: starts the all_reduces of a backward's buckets, and ends each step.

Buckets are submitted on the thread that runs backward. Threads of `Completions` wait for them in
that order and end the step after its last one; only then does backward return.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.futures import Future

from gradwire._communicator import Communicator, Traffic
from gradwire._errors import Aborted, Error
from gradwire.torch.ddp.join_tracker import JoinTracker
from gradwire.torch.ddp.spans import StepSpans
from gradwire.torch.ddp.training_state import TrainingState
from gradwire.torch.exchange.completions import Completions, error_of
from gradwire.torch.exchange.engine import Exchange, Waitable, first_error
from gradwire.torch.exchange.gradient_scale import GradientScale
from gradwire.torch.exchange.hook_state import HookSteps, without_traceback
from gradwire.torch.exchange.stats import Spent

_CLOSE_SECONDS = 10.0
_UNPROFILED = nullcontext()


class Steps(HookSteps):
    """The steps of one DDP model; the first error is final."""

    _closed_message = (
        "the hook's State is closed, and DDP takes one hook: wrap the module in "
        "DistributedDataParallel anew, and register() that"
    )

    def __init__(
        self,
        communicator: Communicator,
        algorithm: str,
        state: TrainingState,
        joins: JoinTracker | None = None,
    ) -> None:
        super().__init__(Exchange(communicator, state, algorithm))
        self.state, self._joins = state, joins
        self.spans = StepSpans(communicator, state.names)
        self._to_raise: Exception | None = None  # the error, with its traceback
        self.submitted_steps = 0  # steps of which DDP has submitted the last bucket
        self.completions = Completions(f"gradwire-ddp-{communicator.rank}")
        self._step = _Step(communicator.traffic)
        self._step.ended.set()

    @property
    def in_join(self) -> bool:
        """Whether ranks may have no inputs left."""
        return self._joins is not None and self._joins.in_join

    def submit_bucket(self, bucket: dist.GradBucket, future: Future[torch.Tensor]) -> None:
        """Starts averaging a bucket in its own buffer; completes the future when that is done.

        Never raises: the future gets the error.
        """
        error: Exception | None = None
        try:
            with _profiled("gradwire:all_reduce"):
                self._start(bucket)
        except Exception as its:
            error = self._note_error(its)
        except BaseException as its:  # Ctrl-C, which a future cannot hold
            error = self._interrupt(its)
        works = self.exchange.take()
        self.submitted_steps += bucket.is_last()
        if self.closed:
            future.set_exception(self._note_error(error or Aborted(self._closed_message)))
            return
        wait = partial(self._wait, works, error)
        finish = self._finish_of(bucket, future)
        if bucket.buffer().is_cuda:
            # At once: a wait for the future makes the waiting stream wait, and the host goes on.
            with _on_gpu_stream(self.communicator, bucket.buffer()):
                finish(error_of(wait))
        else:
            self.completions.submit(wait, finish)

    def _finish_of(
        self, bucket: dist.GradBucket, future: Future[torch.Tensor]
    ) -> Callable[[Exception | None], None]:
        """The call to make when a bucket has come: completes its future, or ends the step."""
        last = bucket.is_last()
        if not (last or self.state.holds_buckets or self._step.averages_over_active):
            return partial(_complete, bucket.buffer(), future)
        self._step.waiting.append((bucket.buffer(), future))
        return self._end_step if last else _do_nothing

    def end_backward(self) -> None:
        """Waits for the step's end; raises the hook's error, or KeyboardInterrupt."""
        began, waits_since = time.perf_counter(), self.spans.now()
        try:
            with _profiled("gradwire:wait"):
                self._step.ended.wait()
        except BaseException as error:
            self._interrupt(error)
            raise
        self.counters.waited(time.perf_counter() - began)
        self.spans.end_backward(waits_since)
        self.raise_error()

    def raise_error(self) -> None:
        """Raises the first error, if there was one."""
        try:
            self.communicator._require_alive_on_gpu()
        except Error as its:
            self._note_error(its)
        if self.error is not None:
            error, self._to_raise = self._to_raise or without_traceback(self.error), None
            raise error

    def check_failure(self, seconds: float) -> None:
        """Raises the first error, also that of a communicator that fails within these seconds."""
        self.raise_error()
        try:
            self.communicator._core.check_failure(seconds)
        except Error as error:
            self._note_error(error)
        self.raise_error()

    def abandon_step(self) -> None:
        """Undoes a step whose backward ended before its last bucket was submitted."""
        self._to_raise = None
        if self._step.ended.is_set():
            return
        waited = threading.Event()
        if not self.closed:  # closed: all submitted work is over
            self.completions.submit(lambda: None, lambda _: waited.set())
            waited.wait()
        super().abandon_step()
        self._step.ended.set()

    def close(self, with_communicator: bool) -> None:
        """Ends the threads, and undoes an unfinished step.

        Aborts the communicator while buckets are in flight.
        """
        self.closed, self._to_raise = True, None
        if self.completions.pending:
            buckets = self.completions.pending
            self.communicator.abort(
                f"closed with {buckets} gradient bucket{'s'[: buckets > 1]} in flight"
            )
        self.completions.close(_CLOSE_SECONDS)
        if with_communicator:
            self.communicator.close()
        self.abandon_step()
        self.state.remove_hooks()

    def _start(self, bucket: dist.GradBucket) -> None:
        self._require_usable()
        if self._step.ended.is_set():
            self._begin()
        self._step.buckets += 1
        self._step.bytes += bucket.buffer().numel() * bucket.buffer().element_size()
        for ready in self.state.ready_buckets(bucket, bucket.is_last()):
            with self.spans.naming(self._step.buckets - 1, ready.names):
                self.exchange.start(ready)
        if bucket.is_last() and self.state.unused is not None:
            has_joined = self._joins is not None and self._joins.has_joined
            self.exchange.add(self.state.unused.share(self.communicator, again=has_joined))
        if bucket.is_last() and self._joins is not None and self._step.averages_over_active:
            self.exchange.add(self._joins.share_count(self.communicator))

    def _begin(self) -> None:
        self.spans.begin_backward()
        over_active = self._joins is not None and self._joins.begin_step()
        self._step = _Step(self.communicator.traffic, over_active)
        self.exchange.open(self.done, self._read_scale())

    def _read_scale(self) -> GradientScale:
        """The scale of the gradients of the step that begins, the same on all ranks."""
        if not self.state.scales.followed:
            return GradientScale()
        joins = self._joins if self.in_join else None
        scale = self.state.scales.read(on_host=joins is not None)
        return scale if joins is None else joins.agree_on_scale(self.communicator, scale)

    def _wait(self, works: Sequence[Waitable], error: Exception | None) -> None:
        """Waits for all works, even if some fail; raises the first error."""
        its = first_error(works)
        first = its if error is None else error
        if first is not None:
            raise self._note_error(first)

    def _end_step(self, error: Exception | None) -> None:
        step = self._step
        try:
            kept = self.exchange.end(error is None)
            if self.error is None:
                self._divide_by_active()
                spent = Spent().plus(self.communicator.traffic, step.before)
                self._count(kept, step.buckets, step.bytes, spent)
        except Exception as its:
            self._note_error(its)
        step.ended.set()
        waiting, step.waiting = step.waiting, []  # release the buffers: DDP may make new ones
        for buffer, future in waiting:
            _complete(buffer, future, self.error)

    def _divide_by_active(self) -> None:
        if self._joins is not None and self._step.averages_over_active:
            factor = self._joins.correction(self.communicator.size)
            for buffer, _ in self._step.waiting:
                buffer.mul_(factor)

    def _note_error(self, error: Exception) -> Exception:
        """The first error, which this one is if there was none."""
        if self.error is None:
            self._to_raise = error
        self._record_error(error)
        assert self.error is not None
        return without_traceback(self.error)

    def _interrupt(self, error: BaseException) -> Exception:
        """Aborts the other ranks after Ctrl-C here; returns the error."""
        what = f"{type(error).__name__} in backward"
        self.communicator.abort(what)
        return self._note_error(Aborted(what))


class _Step:
    """The buckets of one backward."""

    def __init__(self, before: Traffic, averages_over_active: bool = False) -> None:
        self.before, self.averages_over_active = before, averages_over_active
        self.buckets = self.bytes = 0
        self.ended = threading.Event()
        # Completed at the end of the step.
        self.waiting: list[tuple[torch.Tensor, Future[torch.Tensor]]] = []


def _complete(buffer: torch.Tensor, future: Future[torch.Tensor], error: Exception | None) -> None:
    if error is None:
        future.set_result(buffer)
    else:
        future.set_exception(without_traceback(error))


@contextlib.contextmanager
def _on_gpu_stream(communicator: Communicator, buffer: torch.Tensor) -> Iterator[None]:
    """Makes the communicator's stream of asynchronous calls the current one."""
    handle = communicator._gpu_stream
    if handle is None:  # the first call failed
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(handle, device=buffer.device)):
        yield


def _profiled(name: str) -> AbstractContextManager[object]:
    """A named range in torch's profile; none without a profiler, since it takes microseconds."""
    return record_function(name) if torch.autograd._profiler_enabled() else _UNPROFILED


def _do_nothing(_: Exception | None) -> None:
    pass
