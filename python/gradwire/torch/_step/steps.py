"""Steps: takes a backward's buckets on their way, and brings each step to its end.

Buckets are handed over on the thread that runs backward. Threads of `Completions` wait for them, in
that order, and end the step after its last one; only then is backward let go.
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
from gradwire.torch._step.buckets import round_into
from gradwire.torch._step.completions import Completions
from gradwire.torch._step.joined import Active
from gradwire.torch._step.memory import Call, Memory
from gradwire.torch._step.stats import Counters
from gradwire.torch._step.units import Units

_CLOSED = (
    "the hook's State is closed, and DDP takes one hook: wrap the module in "
    "DistributedDataParallel anew, and register() that"
)
_CLOSE_SECONDS = 10.0
_UNRECORDED = nullcontext()


class Steps:
    """One model's; the first error is final."""

    def __init__(
        self,
        communicator: Communicator,
        algorithm: str,
        memory: Memory,
        active: Active | None = None,
    ) -> None:
        self.communicator, self.algorithm, self.memory = communicator, algorithm, memory
        self._active = active
        self.error: Exception | None = None  # never raised: tracebacks refer to the DDP model
        self._to_raise: Exception | None = None  # the same, with where it came from
        self.counters = Counters(communicator.size)
        self.done = 0  # steps whose gradients were all averaged, but for paused ones
        self.handed_over = 0  # steps that DDP has handed over to the last bucket
        self.closed = False
        self.completions = Completions(f"gradwire-ddp-{communicator.rank}")
        self._step = _Step(communicator.traffic)
        self._step.ended.set()
        self._lock = threading.Lock()  # of the step's end

    @property
    def in_join(self) -> bool:
        """Whether ranks may have no inputs left."""
        return self._active is not None and self._active.in_join

    def hand_over(self, bucket: dist.GradBucket, future: Future[torch.Tensor]) -> None:
        """Begins to average the bucket in its own buffer; completes the future when that is done.

        Never raises, but gives the future the error.
        """
        works: list[Work | _Rounded] = []
        error: Exception | None = None
        try:
            with _recorded("gradwire:all_reduce"):
                self._start(bucket, works)
        except Exception as its:
            error = self._first(its)
        except BaseException as its:  # Ctrl-C; a future holds no such thing
            error = self._interrupt(its)
        self.handed_over += bucket.is_last()
        if self.closed:
            future.set_exception(self._first(error or Aborted(_CLOSED)))
            return
        if bucket.buffer().is_cuda:
            self._follow_on_gpu(bucket, future, works, error)
            return
        wait = partial(self._wait, works, error)
        buffer = bucket.buffer()
        finish = self._end if bucket.is_last() else _nothing
        if bucket.is_last() or self.memory.holds or self._step.counts_active:
            self._step.waiting.append((buffer, future))
        else:
            finish = partial(_complete, buffer, future)
        self.completions.submit(wait, finish)

    def _follow_on_gpu(
        self,
        bucket: dist.GradBucket,
        future: Future[torch.Tensor],
        works: Sequence[Work | _Rounded],
        error: Exception | None,
    ) -> None:
        """Completes futures at once, on the stream on which the bucket is averaged.

        So whoever waits for one makes its own stream wait, and the host goes on.
        """
        buffer, last = bucket.buffer(), bucket.is_last()
        with _on_gpu_stream(self.communicator, buffer):
            found = error
            try:
                self._wait(works, error)
            except Exception as its:
                found = its
            if last or self.memory.holds or self._step.counts_active:
                self._step.waiting.append((buffer, future))
            else:
                _complete(buffer, future, found)
            if last:
                self._end(found)

    def end_backward(self) -> None:
        """Waits for the step's end; raises the error, or what Ctrl-C raises."""
        began = time.perf_counter()
        try:
            with _recorded("gradwire:wait"):
                self._step.ended.wait()
        except BaseException as error:
            self._interrupt(error)
            raise
        self.counters.waited(time.perf_counter() - began)
        self.raise_error()

    def raise_error(self) -> None:
        """The first one, if there was any."""
        try:
            self.communicator._require_alive_on_gpu()
        except Error as its:
            self._first(its)
        if self.error is not None:
            error, self._to_raise = self._to_raise or _bare(self.error), None
            raise error

    def hear(self, seconds: float) -> None:
        """Raises the first error, also if outside of steps the communicator fails by then."""
        self.raise_error()
        try:
            self.communicator._core.hear(seconds)
        except Error as error:
            self._first(error)
        self.raise_error()

    def drop(self) -> None:
        """Takes back a step whose backward ended before its last bucket was there."""
        self._to_raise = None
        if self._step.ended.is_set():
            return
        waited = threading.Event()
        if not self.closed:  # and so over
            self.completions.submit(lambda: None, lambda _: waited.set())
            waited.wait()
        self._settle(well=False)
        self._step.ended.set()

    def close(self, with_communicator: bool) -> None:
        """Ends the threads, and takes back a step that was broken off.

        Aborts the communicator where buckets are on their way.
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
        self.drop()
        self.memory.let_go()

    def _start(self, bucket: dist.GradBucket, works: list[Work | _Rounded]) -> None:
        if self.error is not None:
            raise _bare(self.error)
        if self.closed:
            raise Aborted(_CLOSED)
        if self._step.ended.is_set():
            self._begin()
        self._step.count(bucket.buffer())
        for parcel in self.memory.parcels(bucket, bucket.is_last()):
            for call in self.memory.calls(parcel, self.done):
                works.append(self._average(call))
        if bucket.is_last() and self.memory.unused is not None:
            joined = self._active is not None and self._active.joined
            works.append(self.memory.unused.share(self.communicator, again=joined))
        if bucket.is_last() and self._active is not None and self._step.counts_active:
            works.append(self._active.share(self.communicator))

    def _begin(self) -> None:
        counts = self._active is not None and self._active.counts
        self._step = _Step(self.communicator.traffic, counts)
        self.memory.begin_step(self.done, self._units())
        self._step.open = True

    def _units(self) -> Units:
        """Of the gradients of the step that begins, the same on all ranks."""
        units = self.memory.scales.now()
        if self._active is not None:
            self._active.begin_step()
            if self._active.in_join and self.memory.scales.followed:
                return self._active.agree(self.communicator, units)
        return units

    def _average(self, call: Call) -> Work | _Rounded:
        op = "avg"
        if call.arrays[0].dtype is torch.float16:  # a sum may be too large, and then scaled
            op = "sum"
            for each in call.arrays:
                each.mul_(1 / self.communicator.size)
        work: Work = self.communicator.all_reduce(
            call.arrays[0] if len(call.arrays) == 1 else call.arrays,
            op=op,
            algorithm=self.algorithm,
            codec=call.codec,
            keys=call.keys,
            feedback=False if call.keys is None else self.memory.feedback,
            async_op=True,
        )
        return _Rounded(work, call) if call.rounded else work

    def _wait(self, works: Sequence[Work | _Rounded], error: Exception | None) -> None:
        """For all of them, whatever becomes of each; raises the first error."""
        for work in works:
            try:
                work.wait()
            except Exception as its:
                error = error or its
        if error is not None:
            raise self._first(error)

    def _end(self, error: Exception | None) -> None:
        step = self._step
        try:
            kept = self._settle(well=error is None)
            if self.error is None:
                self._divide_by_active()
                now = self.communicator.traffic
                self.counters.end_step(kept, step.buckets, step.bytes, step.before, now)
                self.done += self.memory.counts
        except Exception as its:
            self._first(its)
        step.ended.set()
        waiting, step.waiting = step.waiting, []  # DDP may make new buckets, and these are large
        for buffer, future in waiting:
            _complete(buffer, future, self.error)

    def _divide_by_active(self) -> None:
        if self._active is not None and self._step.counts_active:
            factor = self._active.factor(self.communicator.size)
            for buffer, _ in self._step.waiting:
                buffer.mul_(factor)

    def _settle(self, well: bool) -> bool:
        with self._lock:
            was_open, self._step.open = self._step.open, False
            return was_open and self.memory.end_step(well)

    def _first(self, error: Exception) -> Exception:
        if self.error is None:
            self.error, self._to_raise = _bare(error), error
        return _bare(self.error)

    def _interrupt(self, error: BaseException) -> Exception:
        """Tells the other ranks of Ctrl-C."""
        what = f"{type(error).__name__} in backward"
        self.communicator.abort(what)
        return self._first(Aborted(what))


class _Step:
    """One backward's buckets."""

    def __init__(self, before: Traffic, counts_active: bool = False) -> None:
        self.before, self.counts_active = before, counts_active
        self.buckets = self.bytes = 0
        self.open = False  # the memory's step is
        self.ended = threading.Event()
        self.waiting: list[tuple[torch.Tensor, Future[torch.Tensor]]] = []  # for the end

    def count(self, buffer: torch.Tensor) -> None:
        """A bucket more."""
        self.buckets += 1
        self.bytes += buffer.numel() * buffer.element_size()


class _Rounded:
    """A call whose averages are rounded to the gradients' own type when it is over."""

    def __init__(self, work: Work, call: Call) -> None:
        self._work, self._call = work, call

    def wait(self) -> None:
        """Raises like the call."""
        self._work.wait()
        for gradient, average in zip(self._call.rounded, self._call.arrays, strict=True):
            round_into(gradient, average)


def _bare(error: Exception) -> Exception:
    """A copy without a traceback."""
    try:
        return copy.copy(error)
    except Exception:  # a user's, that cannot be made from its arguments
        return Error(f"{type(error).__name__}: {error}")


def _complete(buffer: torch.Tensor, future: Future[torch.Tensor], error: Exception | None) -> None:
    if error is None:
        future.set_result(buffer)
    else:
        future.set_exception(_bare(error))


@contextlib.contextmanager
def _on_gpu_stream(communicator: Communicator, buffer: torch.Tensor) -> Iterator[None]:
    """Makes current the stream on which the communicator averages what is not waited for."""
    handle = communicator._gpu_stream
    if handle is None:  # the first call failed
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(handle, device=buffer.device)):
        yield


def _recorded(name: str) -> AbstractContextManager[object]:
    """A range in a profile, if one is made: it takes microseconds otherwise, too."""
    return record_function(name) if torch.autograd._profiler_enabled() else _UNRECORDED


def _nothing(_: Exception | None) -> None:
    pass
