"""Steps: starts the all_reduces of a backward's buckets, and ends each step.

Buckets are submitted on the thread that runs backward. Threads of `Completions` wait for them in
that order and end the step after its last one; only then does backward return.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.futures import Future

from gradwire._calls.work import Work
from gradwire._communicator import Communicator, Traffic
from gradwire._errors import Aborted, Error
from gradwire.torch._step.completions import Completions
from gradwire.torch._step.gradient_scale import GradientScale
from gradwire.torch._step.join_tracker import JoinTracker
from gradwire.torch._step.reductions import RoundedWork, average
from gradwire.torch._step.spans import StepSpans
from gradwire.torch._step.stats import Counters, Spent
from gradwire.torch._step.training_state import TrainingState

_CLOSED = (
    "the hook's State is closed, and DDP takes one hook: wrap the module in "
    "DistributedDataParallel anew, and register() that"
)
_CLOSE_SECONDS = 10.0
_UNPROFILED = nullcontext()


class Steps:
    """The steps of one model; the first error is final."""

    def __init__(
        self,
        communicator: Communicator,
        algorithm: str,
        state: TrainingState,
        joins: JoinTracker | None = None,
    ) -> None:
        self.communicator, self.algorithm, self.state = communicator, algorithm, state
        self._way = communicator, algorithm, state.feedback
        self._joins = joins
        self.spans = StepSpans(communicator, state.names)
        # A copy that is never raised: a traceback would keep the DDP model alive.
        self.error: Exception | None = None
        self._to_raise: Exception | None = None  # the same error, with its traceback
        self.counters = Counters(communicator.size)
        self.done = 0  # steps whose gradients were all averaged, without paused ones
        self.submitted_steps = 0  # steps of which DDP has submitted the last bucket
        self.closed = False
        self.completions = Completions(f"gradwire-ddp-{communicator.rank}")
        self._step = _Step(communicator.traffic)
        self._step.ended.set()
        self._lock = threading.Lock()  # guards the end of a step

    @property
    def in_join(self) -> bool:
        """Whether ranks may have no inputs left."""
        return self._joins is not None and self._joins.in_join

    def submit_bucket(self, bucket: dist.GradBucket, future: Future[torch.Tensor]) -> None:
        """Starts averaging a bucket in its own buffer; completes the future when that is done.

        Never raises: the future gets the error.
        """
        works: list[Work | RoundedWork] = []
        error: Exception | None = None
        try:
            with _profiled("gradwire:all_reduce"):
                self._start(bucket, works)
        except Exception as its:
            error = self._record_error(its)
        except BaseException as its:  # Ctrl-C, which a future cannot hold
            error = self._interrupt(its)
        self.submitted_steps += bucket.is_last()
        if self.closed:
            future.set_exception(self._record_error(error or Aborted(_CLOSED)))
            return
        if bucket.buffer().is_cuda:
            self._complete_on_gpu(bucket, future, works, error)
            return
        wait = partial(self._wait, works, error)
        buffer = bucket.buffer()
        finish = self._end_step if bucket.is_last() else _do_nothing
        if bucket.is_last() or self.state.holds_buckets or self._step.averages_over_active:
            self._step.waiting.append((buffer, future))
        else:
            finish = partial(_complete, buffer, future)
        self.completions.submit(wait, finish)

    def _complete_on_gpu(
        self,
        bucket: dist.GradBucket,
        future: Future[torch.Tensor],
        works: Sequence[Work | RoundedWork],
        error: Exception | None,
    ) -> None:
        """Completes the future at once, on the stream that averages the bucket.

        A wait for it then makes the waiting stream wait, and the host goes on.
        """
        buffer, last = bucket.buffer(), bucket.is_last()
        with _on_gpu_stream(self.communicator, buffer):
            found = error
            try:
                self._wait(works, error)
            except Exception as its:
                found = its
            if last or self.state.holds_buckets or self._step.averages_over_active:
                self._step.waiting.append((buffer, future))
            else:
                _complete(buffer, future, found)
            if last:
                self._end_step(found)

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
            self._record_error(its)
        if self.error is not None:
            error, self._to_raise = self._to_raise or without_traceback(self.error), None
            raise error

    def check_failure(self, seconds: float) -> None:
        """Raises the first error, also that of a communicator that fails within these seconds."""
        self.raise_error()
        try:
            self.communicator._core.check_failure(seconds)
        except Error as error:
            self._record_error(error)
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
        self._end_state_step(ok=False)
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

    def _start(self, bucket: dist.GradBucket, works: list[Work | RoundedWork]) -> None:
        if self.error is not None:
            raise without_traceback(self.error)
        if self.closed:
            raise Aborted(_CLOSED)
        if self._step.ended.is_set():
            self._begin()
        self.spans.begin_backward()
        self._step.count(bucket.buffer())
        for ready in self.state.ready_buckets(bucket, bucket.is_last()):
            with self.spans.naming(self._step.buckets - 1, ready.names):
                for call in self.state.calls(ready, self.done):
                    works.append(average(*self._way, call))
        if bucket.is_last() and self.state.unused is not None:
            has_joined = self._joins is not None and self._joins.has_joined
            works.append(self.state.unused.share(self.communicator, again=has_joined))
        if bucket.is_last() and self._joins is not None and self._step.averages_over_active:
            works.append(self._joins.share_count(self.communicator))

    def _begin(self) -> None:
        over_active = self._joins is not None and self._joins.averages_over_active
        self._step = _Step(self.communicator.traffic, over_active)
        self.state.begin_step(self.done, self._read_scale())
        self._step.open = True

    def _read_scale(self) -> GradientScale:
        """The scale of the gradients of the step that begins, the same on all ranks."""
        if self._joins is not None:
            self._joins.begin_step()
        scale = self.state.scales.read(on_host=self.in_join)
        if self._joins is not None and self.in_join and self.state.scales.followed:
            return self._joins.agree_on_scale(self.communicator, scale)
        return scale

    def _wait(self, works: Sequence[Work | RoundedWork], error: Exception | None) -> None:
        """Waits for all works, even if some fail; raises the first error."""
        for work in works:
            try:
                work.wait()
            except Exception as its:
                error = error or its
        if error is not None:
            raise self._record_error(error)

    def _end_step(self, error: Exception | None) -> None:
        step = self._step
        try:
            kept = self._end_state_step(ok=error is None)
            if self.error is None:
                self._divide_by_active()
                spent = Spent().plus(self.communicator.traffic, step.before)
                self.counters.end_step(kept, step.buckets, step.bytes, spent)
                self.done += self.state.is_counted
        except Exception as its:
            self._record_error(its)
        step.ended.set()
        waiting, step.waiting = step.waiting, []  # release the buffers: DDP may make new ones
        for buffer, future in waiting:
            _complete(buffer, future, self.error)

    def _divide_by_active(self) -> None:
        if self._joins is not None and self._step.averages_over_active:
            factor = self._joins.correction(self.communicator.size)
            for buffer, _ in self._step.waiting:
                buffer.mul_(factor)

    def _end_state_step(self, ok: bool) -> bool:
        with self._lock:
            was_open, self._step.open = self._step.open, False
            return was_open and self.state.end_step(ok)

    def _record_error(self, error: Exception) -> Exception:
        if self.error is None:
            self.error, self._to_raise = without_traceback(error), error
        return without_traceback(self.error)

    def _interrupt(self, error: BaseException) -> Exception:
        """Aborts the other ranks after Ctrl-C here; returns the error."""
        what = f"{type(error).__name__} in backward"
        self.communicator.abort(what)
        return self._record_error(Aborted(what))


class _Step:
    """The buckets of one backward."""

    def __init__(self, before: Traffic, averages_over_active: bool = False) -> None:
        self.before, self.averages_over_active = before, averages_over_active
        self.buckets = self.bytes = 0
        self.open = False  # whether the training state's step is open
        self.ended = threading.Event()
        # Completed at the end of the step.
        self.waiting: list[tuple[torch.Tensor, Future[torch.Tensor]]] = []

    def count(self, buffer: torch.Tensor) -> None:
        """Adds a bucket to the counters."""
        self.buckets += 1
        self.bytes += buffer.numel() * buffer.element_size()


def without_traceback(error: Exception) -> Exception:
    """A copy of the error without its traceback."""
    try:
        return copy.copy(error)
    except Exception:  # a user's class that cannot be copied from its arguments
        return Error(f"{type(error).__name__}: {error}")


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
