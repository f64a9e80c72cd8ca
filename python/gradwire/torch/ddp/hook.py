"""The DDP communication hook, and Steps, which start the all_reduces of a backward and end it.

DDP calls the hook once per bucket, in the same order on every rank, on the thread that runs
backward, and goes on with backward while earlier buckets travel. With a hook, DDP leaves the
division by the number of ranks to it. (Li et al. 2020, "PyTorch Distributed", sec. 3.2)

Threads of `Completions` wait for the buckets in that order, and end the step after its last one.
Torch's futures turn every error into a RuntimeError. So the hook has autograd call it back at the
end of backward, just before DDP waits for the futures: backward passes on an error raised there
unchanged.
"""
# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types.

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd.profiler import record_function
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire._communicator import Communicator, Traffic
from gradwire._errors import Aborted, Error, InvalidArgument
from gradwire._trace import clock
from gradwire._trace.track import naming
from gradwire.torch.ddp.join_step import JoinStep
from gradwire.torch.ddp.spans import StepSpans
from gradwire.torch.ddp.training_state import TrainingState
from gradwire.torch.exchange.completions import Completions, error_of
from gradwire.torch.exchange.engine import Exchange, Waitable, first_error
from gradwire.torch.exchange.gradient_scale import GradientScale
from gradwire.torch.exchange.steps import HookSteps, Spent, without_traceback

_CLOSE_SECONDS = 10.0
_NOTHING = nullcontext()


def comm_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over all ranks, in place; for `ddp.register_comm_hook(state, comm_hook)`.

    Returns a future of the bucket's buffer at once; several buckets may be in flight. Raises
    InvalidArgument if `state` is no `State`, and nothing else: backward would end before they are
    over. Errors are in the future and in `state.error`, and the end of backward raises them.
    """
    steps = getattr(state, "_steps", None)
    if not isinstance(steps, Steps):  # no bucket is in flight then
        raise InvalidArgument(
            f"gradwire's comm_hook was registered with {type(state).__name__} in place of a State: "
            "call gradwire.torch.register(ddp), which makes one"
        )
    buffer = bucket.buffer()
    # Without its device, the future of a bucket on a GPU would complete before the bucket.
    future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    averaged = future.then(_value)
    steps.submit_bucket(bucket, future)
    if bucket.is_last():
        with contextlib.suppress(RuntimeError):  # called outside of backward: the future must do
            Variable._execution_engine.queue_callback(steps.end_backward)
    return averaged


def _value(future: Future[torch.Tensor]) -> torch.Tensor:
    """Raises the future's error, so that torch's C++ side sees an error instead of a value."""
    return future.value()


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
        ddp: DistributedDataParallel | None = None,
    ) -> None:
        """`ddp` is the model, of which a hook that was registered by hand does not know."""
        super().__init__(Exchange(communicator, state, algorithm))
        self.state = state
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._trains = False  # whether a forward ran since the last step began
        self._spans: StepSpans | None = None
        self._to_raise: Exception | None = None  # the error, with its traceback
        self.submitted_steps = 0  # steps of which DDP has submitted the last bucket
        self.completions = Completions(f"gradwire-ddp-{communicator.rank}")
        self._step = _Step(communicator.traffic, None)
        self._step.ended.set()

    @property
    def in_join(self) -> bool:
        """Whether ranks may have no inputs left; the same on all ranks."""
        ddp = None if self._ddp is None else self._ddp()
        config = getattr(ddp, "_join_config", None)  # torch offers no public way to it
        return config is not None and bool(config.enable)

    @property
    def spans(self) -> StepSpans | None:
        """What records the steps in a trace; None while the communicator records none."""
        track = self.communicator._track
        if track.recorder is None:
            self._spans = None
        elif self._spans is None:
            self._spans = StepSpans(track, self.state.names)
        return self._spans

    def begin_forward(self) -> None:
        """Raises the first error, if there was one; a step begins."""
        self.raise_error()
        if (spans := self.spans) is not None:
            spans.begin_forward()

    def end_forward(self, *, trains: bool) -> None:
        """Notes the end of a forward; `trains` says that DDP will average its gradients."""
        self._trains = self._trains or trains
        if (spans := self.spans) is not None:
            spans.end_forward()

    def begin_backward(self) -> None:
        """Notes the begin of a backward."""
        if (spans := self.spans) is not None:
            spans.begin_backward()

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
        last, joined = bucket.is_last(), self._step.joined
        if not (last or self.state.holds_buckets or (joined is not None and joined.counts)):
            return partial(_complete, bucket.buffer(), future)
        self._step.waiting.append((bucket.buffer(), future))
        return self._end_step if last else lambda _: None

    def end_backward(self) -> None:
        """Waits for the step's end; raises the hook's error, or KeyboardInterrupt."""
        began, spans = time.perf_counter(), self.spans
        waits_since = None if spans is None else clock.now()
        try:
            with _profiled("gradwire:wait"):
                self._step.ended.wait()
        except BaseException as error:
            self._interrupt(error)
            raise
        self.counters.waited(time.perf_counter() - began)
        if spans is not None:
            spans.end_backward(waits_since)
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
            with self._naming(ready.names):
                self.exchange.start(ready)
        if bucket.is_last():
            self._add_last()

    def _naming(self, parameters: Sequence[str]) -> AbstractContextManager[object]:
        """Names the calls of the block in a trace."""
        if self.spans is None:
            return _NOTHING
        return naming("\n".join([f"#bucket {self._step.buckets - 1}", *parameters]))

    def _add_last(self) -> None:
        """Starts what travels after all buckets."""
        joined = self._step.joined
        if self.state.unused is not None:
            again = joined is not None and not joined.trains
            self.exchange.add(self.state.unused.share(self.communicator, again=again))
        if joined is not None and joined.counts:
            self.exchange.add(joined.share_count(self.communicator))

    def _begin(self) -> None:
        self.begin_backward()
        joined = None
        if self.in_join:
            assert self._ddp is not None
            joined = JoinStep(self._ddp(), trains=self._trains)
        self._trains = False
        if self.first_steps is not None:
            self.first_steps.begin_step(self.counters.last.waited, self._most)
        self._step = _Step(self.communicator.traffic, joined)
        self.exchange.open(self.done, self._read_scale(joined))

    def _most(self, seconds: float) -> float:
        found = np.array([seconds])
        self.communicator.all_reduce(found, op="max")
        return float(found[0])

    def _read_scale(self, joined: JoinStep | None) -> GradientScale:
        """The scale of the gradients of the step that begins, the same on all ranks."""
        if not self.state.scales.followed:
            return GradientScale()
        scale = self.state.scales.read(on_host=joined is not None)
        return scale if joined is None else joined.agree_on_scale(self.communicator, scale)

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
        joined = self._step.joined
        if joined is not None and joined.counts:
            factor = joined.correction(self.communicator.size)
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

    def __init__(self, before: Traffic, joined: JoinStep | None) -> None:
        self.before, self.joined = before, joined  # within join()
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
    return record_function(name) if torch.autograd._profiler_enabled() else _NOTHING
