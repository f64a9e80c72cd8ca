"""Hooks in place of torch's own reductions: between replicas, and to the ranks' shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.torch.backend.reductions import keywords
from gradwire.torch.exchange.engine import round_into
from gradwire.torch.exchange.residual_state import Call
from gradwire.torch.exchange.rules import Bucket
from gradwire.torch.fsdp.residuals import part_name
from gradwire.torch.fsdp.shards import ShardedModule, TorchAllocation
from gradwire.torch.fsdp.state import ShardSteps


class ReplicaAllReduce:
    """The all_reduce of one module's shard between replicas, for `set_all_reduce_hook`."""

    def __init__(self, module: ShardedModule, steps: ShardSteps, state: object) -> None:
        """`state` is kept alive for as long as the model may call."""
        self._module, self._steps, self._state = module, steps, state
        self._partial: torch.Tensor | None = None

    def __call__(self, output: torch.Tensor) -> None:
        """Averages the shard in place; `output` is flat, of FSDP's `reduce_dtype`."""
        with self._steps.ending_on_failure():
            self._average(output)

    def _average(self, output: torch.Tensor) -> None:
        group = self._module.group
        if not group.all_reduce_grads:  # set_requires_all_reduce(False): kept for a later backward
            self._partial = output.clone() if self._partial is None else self._partial + output
            output.zero_()
            return
        if self._partial is not None:
            output += self._partial
            self._partial = None
        op = "avg" if group.gradient_divide_factor is None else "sum"
        shards = self._module.reduced(output.numel())
        starts = _starts([each.padded for each in shards])
        parts = {
            each.name: output[start : start + each.elements].view(each.shape)
            for each, start in zip(shards, starts, strict=True)
            if each.elements
        }
        self._steps.begin()  # even without a part, or the ranks would not end the step together
        if parts:
            gradients = list(parts.values())
            bucket = Bucket(gradients, list(parts), gradients)
            self._steps.reduce(bucket, lambda call: self._run(call, op))

    def _run(self, call: Call, op: str) -> Sequence[torch.Tensor]:
        self._steps.exchange.reduce(call, op).wait()
        return call.arrays


class PartReduceScatter(TorchAllocation):
    """The reduce_scatter of one module's gradients, for `set_custom_reduce_scatter`."""

    def __init__(self, module: ShardedModule, steps: ShardSteps, state: object) -> None:
        """`state` is kept alive for as long as the model may call."""
        self._module, self._steps, self._state = module, steps, state
        self._called = False  # since the last `alone`

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,  # noqa: ARG002 - the same ranks as the communicator
        op: Any,
        async_op: bool = False,  # noqa: ARG002 - torch ignores what is returned
    ) -> None:
        """Reduces a flat buffer of one block for each rank; a block has a part of each parameter.

        Returns when the result is there; on a GPU, when the current stream will have it.
        """
        self._called = True
        with self._steps.ending_on_failure():
            self._reduce(output_tensor, input_tensor, keywords(op))

    def alone(self, output: torch.Tensor) -> None:
        """Adds residuals in place, for a rank without others, where torch does not reduce.

        Torch 2.9 reduces there too, just before.
        """
        if not self._called:
            self(output, output.clone(), None, dist.ReduceOp.SUM)
        self._called = False

    def _reduce(self, output: torch.Tensor, given: torch.Tensor, options: dict[str, Any]) -> None:
        size = self._steps.communicator.size
        shards = self._module.reduced(output.numel())
        blocks = given.view(size, -1)
        starts = _starts([each.padded for each in shards])
        parts = [
            blocks[:, start : start + each.padded]
            for each, start in zip(shards, starts, strict=True)
        ]
        bucket = Bucket([given], [each.name for each in shards], parts)
        self._steps.reduce(bucket, lambda call: self._run(call, given, output, options))

    def _run(
        self, call: Call, given: torch.Tensor, output: torch.Tensor, options: dict[str, Any]
    ) -> Sequence[torch.Tensor]:
        communicator = self._steps.communicator
        size = communicator.size
        result = call.arrays[0].new_empty(sum(each.numel() for each in call.arrays) // size)
        self._steps.exchange.run(
            communicator.reduce_scatter,
            _packed(call, given, size),
            call,
            None if call.keys is None else _by_rank(call.keys, size),
            out=result,
            check="size",
            **options,
        )
        first = 0
        for part in call.rounded or call.arrays:
            start, elements = part.storage_offset() - given.storage_offset(), part.numel() // size
            round_into(output[start : start + elements], result[first : first + elements])
            first += elements
        return [result]


def _packed(call: Call, given: torch.Tensor, size: int) -> torch.Tensor:
    """A call's arrays as one flat array of one block for each rank."""
    if not call.rounded and sum(each.numel() for each in call.arrays) == given.numel():
        return given
    return torch.cat([each.reshape(size, -1) for each in call.arrays], 1).view(-1)


def _by_rank(keys: Sequence[tuple[str, int]], size: int) -> list[tuple[str, int]]:
    return [(part_name(name, rank), count // size) for rank in range(size) for name, count in keys]


def _starts(sizes: Sequence[int]) -> list[int]:
    """The first element of each of the runs that lie end to end."""
    return [sum(sizes[:i]) for i in range(len(sizes))]
