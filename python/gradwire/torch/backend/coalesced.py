"""Coalesced collectives: lists of tensors, which are one operation of gradwire for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gradwire.torch.backend.activation_codec import ActivationCodec
from gradwire.torch.backend.collectives import Tensors, bare_options
from gradwire.torch.backend.endpoint import Endpoint
from gradwire.torch.backend.operations import Done, Operation
from gradwire.torch.backend.reductions import keywords
from gradwire.torch.backend.staging import Staging, as_bytes, flat


class CoalescedCollectives:
    """Methods that torch calls with one tensor, or one pair of tensors, for each of several calls.

    On every rank the lists are alike.
    """

    _endpoint: Endpoint
    _codec: ActivationCodec
    _gathered: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    allgather: Callable[..., Operation]
    all_gather_single: Callable[..., Operation]
    reduce_scatter_single: Callable[..., Operation]

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None, **given: Any) -> Operation:
        """Reduces each tensor of all ranks, on all ranks, in place."""
        options = bare_options(opts, given)
        tensors = list(tensors)
        all_reduce = self._endpoint.communicator.all_reduce

        def begin(chosen: Sequence[int]) -> Operation:
            results = [tensors[i] for i in chosen]
            named, dtype = self._codec.reduction(options.reduceOp, *results)
            staging = self._endpoint.staging("all_reduce", results[0], named)
            named = staging.averages(named, self._endpoint.communicator.size, results)
            x = [staging.update(each, dtype) for each in results]
            call = partial(all_reduce, x, check="size", **named)
            return self._endpoint.run(call, options, results, staging)

        return self._by_dtype(tensors, begin)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, **given: Any
    ) -> Operation:
        """Copies each tensor of each rank to all ranks; several dtypes travel together."""
        options = bare_options(opts, given)
        outputs, inputs = list(outputs), list(inputs)
        if not inputs:
            return self._endpoint.operation(Done(), [])
        if not inputs[0].is_cpu:  # GPUs take one array
            return self._one_by_one(self.all_gather_single, outputs, inputs, opts, **given)
        staging = Staging()
        form = flat if len({each.dtype for each in inputs}) == 1 else as_bytes
        form = as_bytes if self._codec.compresses else form
        pairs = [self._gathered(staging, *each) for each in zip(outputs, inputs, strict=True)]
        call = partial(
            self._endpoint.communicator.all_gather,
            [form(x) for x, _ in pairs],
            out=[form(out) for _, out in pairs],
            check="size",
        )
        return self._endpoint.run(call, options, outputs, staging)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: Any, inputs: Tensors, opts: Any = None, **given: Any
    ) -> Operation:
        """Copies each tensor of each rank to all ranks, in a list of lists by rank."""
        options = bare_options(opts, given)
        inputs, staging = list(inputs), Staging()
        if inputs and not inputs[0].is_cpu:
            results_of = [[list(each)] for each in zip(*output_lists, strict=True)]
            return self._one_by_one(
                self.allgather, results_of, [[each] for each in inputs], opts, **given
            )
        wholes = [each.new_empty(self._endpoint.communicator.size, *each.shape) for each in inputs]
        for rank, of_rank in enumerate(output_lists):
            for result, whole in zip(of_rank, wholes, strict=True):
                staging.copied(result, whole[rank])
        pairs = [self._gathered(staging, *each) for each in zip(wholes, inputs, strict=True)]
        call = partial(
            self._endpoint.communicator.all_gather,
            [as_bytes(x) for x, _ in pairs],
            out=[as_bytes(out) for _, out in pairs],
            check="size",
        )
        results = [each for of_rank in output_lists for each in of_rank]
        return self._endpoint.run(call, options, results, staging)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, **given: Any
    ) -> Operation:
        """Reduces tensors of one block for each rank; each rank gets its own block of each."""
        options = bare_options(opts, given)
        outputs, inputs = list(outputs), list(inputs)
        reduce_scatter = self._endpoint.communicator.reduce_scatter

        def begin(chosen: Sequence[int]) -> Operation:
            results, wholes = [outputs[i] for i in chosen], [inputs[i] for i in chosen]
            # Codecs and GPUs are for one array.
            if not wholes[0].is_cpu or any(self._codec.takes([each]) for each in wholes):
                return self._one_by_one(self.reduce_scatter_single, results, wholes, opts, **given)
            staging = Staging()
            x = [flat(staging.read(each)) for each in wholes]
            out = [flat(staging.write(each)) for each in results]
            size = self._endpoint.communicator.size
            named = staging.averages(keywords(options.reduceOp), size, results)
            call = partial(reduce_scatter, x, out=out, check="size", **named)
            return self._endpoint.run(call, options, results, staging)

        return self._by_dtype(inputs, begin)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, _: torch.device) -> None:
        """Begins to collect operations for `_end_coalescing`; each still begins at once."""
        self._endpoint.start_batch()

    def _end_coalescing(self, _: torch.device) -> Operation:
        """All operations since `_start_coalescing`, as one."""
        return self._endpoint.end_batch()

    def _one_by_one(
        self, call: Callable[..., Operation], outputs: Any, inputs: Any, opts: Any, **given: Any
    ) -> Operation:
        """Makes a call for each tensor; returns all as one operation."""
        pairs = zip(outputs, inputs, strict=True)
        return self._endpoint.together([call(out, x, opts, **given) for out, x in pairs])

    def _by_dtype(self, tensors: Tensors, begin: Callable[[Sequence[int]], Operation]) -> Operation:
        """Begins one operation for the tensors of each dtype; returns all as one."""
        chosen: dict[torch.dtype, list[int]] = {}
        for i, each in enumerate(tensors):
            chosen.setdefault(each.dtype, []).append(i)
        begun = [begin(each) for each in chosen.values()]
        if len(begun) == 1:
            return begun[0]
        return self._endpoint.together(begun)
