"""FSDPState: the state of the hooks of a model that FSDP2 shards."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire._base.rules import require_matches
from gradwire._calls.reductions import CodecLike
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire._launch import at_exit
from gradwire.torch._fsdp.residuals import PartResiduals, ShardResiduals
from gradwire.torch._fsdp.shards import Shard
from gradwire.torch._fsdp.steps import ShardSteps, Vote
from gradwire.torch._step.gradient_scale import Scaler, persistent_state_of
from gradwire.torch._step.hook_state import HookState, feedback_for
from gradwire.torch._step.optimizers import OptimizerWatch
from gradwire.torch._step.rules import CodecChoice, Rules


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
        codec: CodecChoice,
        shards: Sequence[Shard],
        *,
        shard_group: dist.ProcessGroup | None,
        feedback: ErrorFeedback | bool | None,
        rules: Sequence[tuple[str, CodecChoice]],
        min_elements: int,
        scaler: Scaler | None,
        optimizer: torch.optim.Optimizer | None,
        owned: Sequence[Communicator],
    ) -> None:
        """Takes the options of `register_fsdp`; `shard_group` is None for a model without replicas.

        `owned` are the communicators that `close` closes too. Raises InvalidArgument.
        """
        self.communicator, self.codec = communicator, codec
        self._rules = Rules(codec, rules, min_elements)
        self._shards, self._shard_group = shards, shard_group
        require_matches(rules, [each.name for each in shards])
        kept = feedback_for(feedback, self._rules, named=True)
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
            persistent_state_of(kept).state = weakref.ref(self)
        passes = 1 if shard_group is None else 2
        votes = _votes(communicator, shard_group)
        self._steps = ShardSteps(communicator, training, votes, owned, passes=passes)
        self._close = weakref.finalize(self, self._steps.close, True)
        # gradwire closes it at exit: weakref's own order depends on what was imported first.
        self._close.atexit = False
        at_exit.close_first(self._steps)
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
        flag = torch.tensor([found], dtype=torch.uint8, device="cpu")
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


def _norm(values: Any) -> float:
    return float(torch.as_tensor(values, dtype=torch.float64, device="cpu").norm())
