"""FSDPState, the state of the hooks of a model that FSDP2 shards, and ShardSteps, its backwards.

FSDP calls where it would reduce, and on the CPU it waits there. A step ends when backward does, in
a callback of autograd's that follows FSDP's own.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd import graph as autograd

from gradwire._base.rules import require_matches
from gradwire._calls.requests import CodecLike
from gradwire._communicator import Communicator
from gradwire._errors import Aborted, Error, InvalidArgument
from gradwire.torch._ranks.settings import require_algorithm
from gradwire.torch.exchange.automatic import Later
from gradwire.torch.exchange.compression import START, Compression
from gradwire.torch.exchange.engine import Exchange
from gradwire.torch.exchange.gradient_scale import Scaler, persistent_state_of
from gradwire.torch.exchange.hook_state import HookState
from gradwire.torch.exchange.optimizer_watch import OptimizerWatch
from gradwire.torch.exchange.residual_state import Call, ResidualState
from gradwire.torch.exchange.rules import Bucket
from gradwire.torch.exchange.steps import HookSteps, Spent
from gradwire.torch.fsdp.residuals import PartResiduals, ShardResiduals
from gradwire.torch.fsdp.shards import Shard

Vote = Callable[[torch.Tensor], object]  # reduces a flag to the least of some ranks', in place


class FSDPState(HookState):
    """The hooks' state for one model that FSDP2 shards. Made by `register_fsdp`.

    `communicator` joins the ranks between which gradients travel: the replicas of this rank's
    shard, or all ranks without replicas. `error` is the first error, and final: its backward raises
    it, and so do all later backwards. Gradients are undefined then; call `register_fsdp` again with
    a model made anew to go on. After `close`, backwards raise, and parameters are gathered as they
    are. Methods and properties are those of `State`.
    """

    _steps: ShardSteps

    def __init__(
        self,
        communicator: Communicator,
        compression: Compression,
        shards: Sequence[Shard],
        device: torch.device,
        *,
        shard_group: dist.ProcessGroup | None,
        algorithm: str,
        scaler: Scaler | None,
        optimizer: torch.optim.Optimizer | None,
        owned: Sequence[Communicator],
        later: Later | None = None,
    ) -> None:
        """Takes the options of `register_fsdp`; `shard_group` is None for a model without replicas.

        Gradients are on `device`. `owned` are the communicators that `close` closes too. `later`
        chooses the codec again after the first steps. Raises InvalidArgument.
        """
        self.communicator, self.codec = communicator, compression.codec
        self._rules = compression.table
        self._shards, self._shard_group = shards, shard_group
        collective = "reduce_scatter" if shard_group is None else "all_reduce"
        lossy = self._rules.lossy or (None if later is None else START)
        require_algorithm(algorithm, lossy, communicator, collective)
        require_matches(compression.rules, [each.name for each in shards])
        kept = compression.residuals(self._rules)
        options: tuple[Any, ...] = (self._rules, kept, scaler, optimizer)
        if shard_group is None:
            self._require_uncompounded()
            training: PartResiduals | ShardResiduals = PartResiduals(
                shards, communicator.size, *options
            )
        else:
            place = (shard_group.rank(), shard_group.size())
            training = ShardResiduals(shards, place, communicator.size, *options)
        self._training = training
        self._names = dict(training._names)
        if kept is not None:
            persistent_state_of(kept).require_free(self._names)
        passes = 1 if shard_group is None else 2
        votes = _votes(communicator, shard_group)
        self._steps = ShardSteps(
            communicator, training, votes, owned, device, algorithm=algorithm, passes=passes
        )
        self._begin(True, later)
        watch = OptimizerWatch(self)
        if optimizer is not None:
            watch.look_at(optimizer, self)

    def __repr__(self) -> str:
        failed = f", error={self.error!r}" if self.error else ""
        return (
            f"FSDPState(rank {self.communicator.rank} of {self.communicator.size}, "
            f"codec={self.codec!r}, steps={self.steps}, bytes={self.bytes}{failed})"
        )

    def should_stop(self) -> bool:
        """Whether a rank was asked to stop; the same on all ranks after the same step.

        As `State.should_stop`. Between the shards of a replica, if it has several, torch's group
        exchanges one byte in each call, so every rank must make it.
        """
        found = super().should_stop()
        if self._shard_group is None or self._shard_group.size() == 1:
            return found
        flag = torch.tensor([found], dtype=torch.uint8, device=self._steps.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._shard_group)
        return bool(flag.item())

    def load_state_dict(self, saved: Mapping[str, Any], *, resized: bool = False) -> None:
        """Continues from this rank's `state_dict`; every rank calls it, before a step.

        With the same model, ranks and settings, training has the same bits as if it had not been
        interrupted. `saved` may also be the result of `gather_state_dict`, which without replicas
        is that of all ranks, and otherwise that of the replicas of one shard: the rank takes its
        share, even if their number has changed. Raises InvalidArgument for the state of another
        model, rank, shard or number of ranks. `resized=True` accepts another rank and number.
        """
        super().load_state_dict(saved, resized=resized)

    def _stepped(self) -> Mapping[torch.Tensor, str]:
        return {each.its.sharded_param: each.name for each in self._shards}

    def _parameters(self) -> Iterable[tuple[CodecLike, int, float]]:
        elements = {each.name: each.elements for each in self._shards}
        norms = dict.fromkeys(elements, 0.0)
        for key in self._names.values():
            name = key if key in norms else key.rpartition("[")[0]
            kept = self.feedback.residual(key) if self.feedback is not None else ()
            norms[name] = math.hypot(norms[name], _norm(kept))
        for each in self._shards:
            step = max(self.steps - 1, 0)
            codec = self._rules.codec(each.name, self._compared(each), step)
            yield codec, each.elements, norms[each.name]

    def _compared(self, shard: Shard) -> int:
        """The elements by which rules decide whether a parameter is small."""
        if isinstance(self._training, PartResiduals):
            return shard.padded * self.communicator.size
        return shard.elements

    def _require_uncompounded(self) -> None:
        for choice in self._rules.codecs(0):
            if str(choice).startswith("lowrank"):
                raise InvalidArgument(
                    f"codec '{choice}' is for all_reduce, and a model without replicas has "
                    "reduce_scatter only: give another codec, or a mesh of two dimensions"
                )


def _votes(communicator: Communicator, shard_group: dist.ProcessGroup | None) -> list[Vote]:
    votes: list[Vote] = []
    if shard_group is not None and shard_group.size() > 1:
        votes.append(lambda flag: dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=shard_group))
    votes.append(lambda flag: communicator.all_reduce(flag, op="min"))
    return votes


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _norm(values: Any) -> float:
    return float(torch.as_tensor(values, dtype=torch.float64, device="cpu").norm())


class ShardSteps(HookSteps):
    """The steps of one model; the first error is final."""

    _closed_message = "the hook's State is closed: call register_fsdp() for the model again"

    def __init__(
        self,
        communicator: Communicator,
        state: ResidualState,
        votes: Sequence[Vote],
        owned: Sequence[Communicator],
        device: torch.device,
        *,
        algorithm: str,
        passes: int,
    ) -> None:
        """`votes` make all ranks end a step alike; `owned` are the communicators to close.

        Gradients are on `device`. `passes` is how often a gradient's bytes travel in a ring: twice
        in an all_reduce, and once in a reduce_scatter.
        """
        super().__init__(Exchange(communicator, state, algorithm), passes)
        self._votes, self._owned, self.device = votes, owned, device
        self._stream: torch.cuda.Stream | None = None  # of reductions on a GPU
        self._task: int | None = None  # of autograd, in which the last step began
        self._buckets = self._bytes = 0
        self._waited = 0.0  # seconds in its reductions, where the host waits for them
        self._spent = Spent()
        self._finite: list[torch.Tensor] = []  # whether each result is

    def reduce(self, bucket: Bucket, run: Callable[[Call], Iterable[torch.Tensor]]) -> None:
        """Makes a bucket's calls by `run`, which returns their results."""
        self.begin()
        began, before = time.perf_counter(), self.communicator.traffic
        for call in self.exchange.residuals.calls(bucket):
            for result in run(call):
                self._finite.append(torch.isfinite(result).all())
        self._spent = self._spent.plus(self.communicator.traffic, before)
        self._waited += time.perf_counter() - began
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

    def close(self, with_communicator: bool) -> None:
        """Undoes an unfinished step, and closes the communicators that are the hook's own."""
        super().close(with_communicator)
        if with_communicator:
            for each in self._owned:
                each.close()

    def begin(self) -> None:
        """Begins the backward's step, if it has not begun; raises an earlier step's error.

        Raises InvalidArgument where it could not tell when the step ends.
        """
        self._require_usable()
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        task = torch._C._current_graph_task_id()
        if self.exchange.is_open and task == self._task:
            return
        _require_whole_backward(task)
        if self.first_steps is not None:
            self.first_steps.begin_step(self._waited, self._most)
        self.exchange.open(self.done, self.exchange.residuals.scales.read())
        self._task = task
        self._buckets = self._bytes = 0
        self._waited = 0.0
        self._spent, self._finite = Spent(), []
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        with self.ending_on_failure(), _on(self._stream):
            kept = self.exchange.end(self._agree())
            self._count(kept, self._buckets, self._bytes, self._spent)

    def _agree(self) -> bool:
        """Whether all ranks' results are finite, if that decides over residuals.

        The host does not wait for a GPU: what ranks agree on decides there.
        """
        residuals, on_gpu = self.exchange.residuals, self.device.type == "cuda"
        if residuals.feedback is None or not residuals.is_counted:
            return on_gpu or all(map(bool, self._finite))
        own = self._finite or [self._yes()]  # a rank may have no part of any parameter
        flag = torch.stack(own).all().to(torch.uint8).view(1)
        for vote in self._votes:
            vote(flag)
        if not on_gpu:
            return bool(flag)
        assert self._stream is not None
        probe = flag.float().reciprocal()  # of 0 it is not finite
        feedback, stream = residuals.feedback, self._stream.cuda_stream
        feedback._require_finite(probe.data_ptr(), probe.numel(), probe, stream)
        return True

    def _most(self, seconds: float) -> float:
        least = torch.tensor([-seconds], dtype=torch.float32, device=self.device)
        for vote in self._votes:
            vote(least)
        return -float(least)

    def _yes(self) -> torch.Tensor:
        return torch.ones((), dtype=torch.bool, device="cpu").to(device=self.device)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            error = Aborted(f"{type(error).__name__} in backward")
        self._record_error(error)
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
