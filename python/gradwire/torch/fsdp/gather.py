"""The all_gather of parameters in a codec, for `set_custom_all_gather`.

Each rank's own shard is decoded too, so that all ranks compute with the same parameters. The
optimizer's own shards stay as they are, so what the codec loses does not add up. Once the hooks'
state is closed, parameters are gathered as torch does it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire.torch.exchange.payloads import Payloads
from gradwire.torch.fsdp.shards import ShardedModule, TorchAllocation
from gradwire.torch.fsdp.state import ShardSteps


class _Run(NamedTuple):
    """One parameter's elements in each rank's block, and its bytes in each rank's payload."""

    first: int
    end: int
    first_byte: int
    end_byte: int
    is_coded: bool


class PayloadAllGather(TorchAllocation):
    """The all_gather of one module's parameters."""

    def __init__(
        self,
        module: ShardedModule,
        communicator: Communicator,
        payloads: Payloads,
        min_elements: int,
        steps: ShardSteps,
    ) -> None:
        """Shards of parameters of fewer than `min_elements` elements travel as they are.

        `steps` are those of the model's hooks, and say when these are closed.
        """
        self._module, self._communicator, self._payloads = module, communicator, payloads
        self._min_elements, self._steps = min_elements, steps

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """Gathers flat blocks of all ranks; returns when their stream has them."""
        if self._steps.closed:
            return torchs_own()(output_tensor, input_tensor, group, async_op)
        self._gather(output_tensor, input_tensor)
        return None

    def _gather(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> None:
        if self._payloads.are_exact:
            codec = self._payloads.name
            self._communicator.all_gather(
                input_tensor, out=output_tensor, codec=codec, check="size"
            )
            return
        runs = self._runs(input_tensor)
        size, total = self._communicator.size, runs[-1].end_byte
        payload = input_tensor.new_empty(total, dtype=torch.uint8)
        for run in runs:
            given, coded = input_tensor[run.first : run.end], payload[run.first_byte : run.end_byte]
            if run.is_coded:
                self._payloads.encode(given, coded)
            else:
                coded.copy_(given.view(torch.uint8))
        gathered = payload.new_empty(size * total)
        self._communicator.all_gather(payload, out=gathered, check="size")
        blocks = output_tensor.view(size, -1)
        for block, its in zip(blocks, gathered.view(size, -1), strict=True):
            for run in runs:
                result, coded = block[run.first : run.end], its[run.first_byte : run.end_byte]
                if run.is_coded:
                    self._payloads.decode(coded, result)
                else:
                    result.view(torch.uint8).copy_(coded)

    def _runs(self, given: torch.Tensor) -> list[_Run]:
        self._require_known(given)
        runs: list[_Run] = []
        first = first_byte = 0
        for each in self._module.shards:
            end = first + each.padded
            part = given[first:end]
            is_coded = each.padded * self._communicator.size >= self._min_elements
            is_coded = is_coded and self._payloads.shrinks(part)
            bytes_ = (
                self._payloads.size(part.numel())
                if is_coded
                else part.numel() * part.element_size()
            )
            runs.append(_Run(first, end, first_byte, first_byte + bytes_, is_coded))
            first, first_byte = end, first_byte + bytes_
        return runs

    def _require_known(self, given: torch.Tensor) -> None:
        """Raises InvalidArgument for a buffer that does not hold the shards one after the other."""
        expected = sum(each.padded for each in self._module.shards)
        if given.numel() != expected or given.dtype is torch.uint8:
            raise InvalidArgument(
                f"module {self._module.name!r} gathers {given.numel()} elements of {given.dtype}, "
                f"and its parameters have {expected}: gather_codec= is for parameters of one dtype "
                "without fsdp_pre_all_gather, and for reshard_after_forward=True or False"
            )


def torchs_own() -> Any:
    """The all_gather that a module has without this one."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    return DefaultAllGather()
