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
import weakref
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire import _core
from gradwire._communicator import Communicator
from gradwire._errors import Aborted, InvalidArgument, ScheduleError
from gradwire._schedules import Schedule
from gradwire._work import Work
from gradwire.torch._buffers import broadcast_buffers_by
from gradwire.torch._completions import Completions
from gradwire.torch._group import communicator_of

_CLOSE_SECONDS = 10.0


class State:
    """What the hook knows between buckets; one for each DDP model.

    `error` is the first error, which is final: the backward that it belongs to raises it, and so
    do all later ones and, where `register` made the state, every forward in training. Gradients are
    undefined then. Build a new DDP model to go on.
    """

    def __init__(
        self,
        communicator: Communicator,
        codec: str = "none",
        algorithm: str = "auto",
        *,
        owns_communicator: bool = False,
    ) -> None:
        """`owns_communicator` says that `close` closes it too.

        Raises InvalidArgument for an unknown codec or algorithm.
        """
        _core.Codec(codec)  # refuses an unknown one
        _require_algorithm(algorithm, codec, communicator)
        self.communicator = communicator
        self.codec = codec
        self.algorithm = algorithm
        self.error: Exception | None = None
        self.steps = 0  # backward passes whose gradients were all averaged
        self.buckets = 0
        self.bytes = 0  # of averaged gradients, before the codec
        self._completions = Completions(f"gradwire-ddp-{communicator.rank}")
        # At exit it runs before the interpreter shuts down.
        self._close = weakref.finalize(
            self, _close, self._completions, communicator, owns_communicator
        )

    def __repr__(self) -> str:
        failed = f", error={self.error!r}" if self.error else ""
        return (
            f"State(rank {self.communicator.rank} of {self.communicator.size}, "
            f"codec={self.codec!r}, algorithm={self.algorithm!r}, steps={self.steps}, "
            f"bytes={self.bytes}{failed})"
        )

    @property
    def closed(self) -> bool:
        """Whether close() was called, or the interpreter ends."""
        return not self._close.alive

    def close(self) -> None:
        """Ends the hook's threads, and its communicator if `register` made that; also at exit.

        Aborts the communicator where buckets are on their way.
        """
        self._close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a gradwire State holds connections and threads and cannot be copied or saved, nor can "
            "the DDP model that it is registered for: save ddp.module.state_dict(), and call "
            "gradwire.torch.register() for the model that is loaded"
        )

    def _start(self, bucket: dist.GradBucket, future: Future[torch.Tensor]) -> Work:
        """Begins to average the bucket in its own buffer, and completes the future when done."""
        if self.error is not None:
            raise self.error
        if self.closed:
            raise Aborted("the hook's State is closed: register another")
        buffer = _dense(bucket)
        # Other types travel as they are: a codec would have to convert twice or lose range.
        codec = self.codec if buffer.dtype is torch.float32 else "none"
        work: Work = self.communicator.all_reduce(
            buffer, op="avg", algorithm=self.algorithm, codec=codec, async_op=True
        )
        self._completions.submit(work.wait, partial(self._finish, buffer, bucket.is_last(), future))
        return work

    def _finish(
        self,
        buffer: torch.Tensor,
        is_last: bool,
        future: Future[torch.Tensor],
        error: Exception | None,
    ) -> None:
        if error is not None:
            self._fail(error, future)
            return
        self.buckets += 1
        self.bytes += buffer.numel() * buffer.element_size()
        self.steps += is_last
        future.set_result(buffer)

    def _fail(self, error: Exception, future: Future[torch.Tensor]) -> None:
        future.set_exception(self._first(error))

    def _first(self, error: Exception) -> Exception:
        if self.error is None:
            self.error = error
        return self.error

    def _end_backward(self, last: Work | None) -> None:
        """Waits for the last bucket, and so for all; raises the error, or what Ctrl-C raises."""
        try:
            if last is not None:
                last.wait()
        except Exception as error:
            raise self._first(error) from None
        except BaseException as error:
            self._interrupt(error)
            raise
        self._raise_error()

    def _interrupt(self, error: BaseException) -> Exception:
        """Tells the other ranks of Ctrl-C, if the communicator did not see it."""
        what = f"{type(error).__name__} in backward"
        self.communicator.abort(what)
        return self._first(Aborted(what))

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error


def comm_hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over all ranks, in place; for `ddp.register_comm_hook(state, comm_hook)`.

    Returns at once; several buckets may be on their way. Never raises, lest backward ends before
    they are over: errors are in the future and in `state.error`, and the end of backward raises
    them.
    """
    future: Future[torch.Tensor] = Future()
    averaged = future.then(_value)
    work = None
    try:
        work = state._start(bucket, future)
    except Exception as error:
        state._fail(error, future)
    except BaseException as error:  # Ctrl-C; a future holds no such thing
        state._fail(state._interrupt(error), future)
    if bucket.is_last():
        with contextlib.suppress(RuntimeError):  # called outside of backward: the future remains
            Variable._execution_engine.queue_callback(partial(state._end_backward, work))
    return averaged


def register(
    ddp: DistributedDataParallel,
    codec: str = "none",
    algorithm: str = "auto",
    communicator: Communicator | None = None,
    *,
    timeout: float = 300,
) -> State:
    """Makes a DDP model average its gradients with gradwire; every rank calls it, before training.

    `codec` ("none", "fp16", "bf16") applies to float32 gradients; others travel as they are.
    Without a communicator, one with `timeout` (seconds) is made over the ranks of
    `ddp.process_group`, which must be able to exchange CPU tensors, as gloo's are. Raises
    RendezvousError, and InvalidArgument for an unknown codec or algorithm and for a communicator of
    another size or another order of ranks.

    Buffers (of batch normalisation) travel over gradwire too. Forward and backward raise gradwire's
    errors, which name the rank that failed.
    """
    _core.Codec(codec)  # refuses an unknown one before the ranks meet
    owns = communicator is None
    if communicator is None:
        communicator = communicator_of(ddp.process_group, timeout)
    _require_same_ranks(communicator, ddp.process_group)
    state = State(communicator, codec, algorithm, owns_communicator=owns)
    ddp.register_comm_hook(state, comm_hook)
    ddp.register_forward_pre_hook(partial(_refuse_training, state))
    broadcast_buffers_by(ddp, state)
    return state


def _refuse_training(state: State, ddp: DistributedDataParallel, _: Any) -> None:
    if ddp.training and torch.is_grad_enabled():
        state._raise_error()


def _value(future: Future[torch.Tensor]) -> torch.Tensor:
    """Raises what the future holds, so that torch's C++ side sees an error and not a value."""
    return future.value()


def _dense(bucket: dist.GradBucket) -> torch.Tensor:
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        shapes = ", ".join(str(tuple(each.shape)) for each in bucket.parameters())
        raise InvalidArgument(
            f"bucket {bucket.index()} has sparse gradients, for parameters of shape {shapes}; "
            "gradwire averages dense ones: build the embedding with sparse=False"
        )
    return buffer


def _require_algorithm(algorithm: str, codec: str, communicator: Communicator) -> None:
    if algorithm == "auto":
        return
    try:
        made = Schedule.generate(algorithm, communicator.size, groups=communicator.hosts)
    except ScheduleError as error:
        raise InvalidArgument(f"algorithm={algorithm!r}: {error}") from error
    if codec != "none" and not made.verify().in_tree:
        raise InvalidArgument(
            f"algorithm={algorithm!r} adds a partial sum to several others, which the lossy "
            f"codec={codec!r} cannot: use auto, ring, direct or a tree"
        )


def _require_same_ranks(communicator: Communicator, group: dist.ProcessGroup) -> None:
    have, want = (communicator.rank, communicator.size), (group.rank(), group.size())
    if have != want:
        raise InvalidArgument(
            f"the communicator says rank {have[0]} of {have[1]}, the model's process group says "
            f"rank {want[0]} of {want[1]}: they must consist of the same ranks in the same order"
        )


def _close(completions: Completions, communicator: Communicator, owns: bool) -> None:
    if completions.pending:
        buckets = completions.pending
        communicator.abort(f"closed with {buckets} gradient bucket{'s'[: buckets > 1]} in flight")
    completions.close(_CLOSE_SECONDS)
    if owns:
        communicator.close()
