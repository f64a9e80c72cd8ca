"""Collectives of a process group, under the names of all versions of torch.

Each takes torch's tensors and options and makes one call of the communicator. Sizes are compared
between ranks and shapes are not: torch lets ranks give other shapes of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from gradwire._errors import InvalidArgument
from gradwire.torch.backend.activation_codec import ActivationCodec
from gradwire.torch.backend.endpoint import Endpoint
from gradwire.torch.backend.operations import Operation
from gradwire.torch.backend.sparse import all_reduce_sparse
from gradwire.torch.backend.staging import Staging, flat

Tensors = Sequence[torch.Tensor]


class Collectives:
    """Methods that torch calls on every rank of the group."""

    _endpoint: Endpoint
    _codec: ActivationCodec

    def allreduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, **given: Any
    ) -> Operation:
        """Reduces a tensor of all ranks, on all ranks, in place."""
        options = bare_options(opts, given)
        (tensor,) = _listed(tensors)
        if tensor.layout is torch.sparse_coo:
            return _told_by_backward(all_reduce_sparse(self._endpoint, tensor, options))
        named, dtype = self._codec.reduction(options.reduceOp, tensor)
        staging = self._endpoint.staging("all_reduce", tensor, named)
        named = staging.averages(named, self._endpoint.communicator.size, [tensor])
        x = staging.update(tensor, dtype)
        call = partial(self._endpoint.communicator.all_reduce, x, check="size", **named)
        return _told_by_backward(self._endpoint.run(call, options, [tensor], staging))

    def broadcast(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, **given: Any
    ) -> Operation:
        """Copies the root's tensor to all ranks, in place."""
        options = bare_options(opts, given)
        (tensor,) = _listed(tensors)
        staging = self._endpoint.staging("broadcast", tensor)
        root = options.rootRank
        stage = staging.read if root == self._endpoint.communicator.rank else staging.write
        call = partial(
            self._endpoint.communicator.broadcast, stage(tensor), root=root, check="size"
        )
        return self._endpoint.run(call, options, [tensor], staging)

    def reduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, **given: Any) -> Operation:
        """Reduces a tensor of all ranks, on the root, in place."""
        options = bare_options(opts, given)
        (tensor,) = _listed(tensors)
        named, dtype = self._codec.reduction(options.reduceOp, tensor)
        staging = self._endpoint.staging("reduce", tensor, named)
        root, comm = options.rootRank, self._endpoint.communicator
        named = staging.averages(named, comm.size, [tensor], here=root == comm.rank)
        stage = staging.update if root == comm.rank else staging.read
        call = partial(
            comm.reduce,
            stage(tensor, dtype),
            root=root,
            check="size",
            **named,
        )
        return self._endpoint.run(call, options, [tensor], staging)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> Operation:
        """Copies each rank's tensor, of any size, to all ranks."""
        options = bare_options(opts, given)
        (tensor,), (results,) = _listed(inputs), _nested(outputs)
        compresses = self._codec.compresses
        staging = self._endpoint.staging("all_gather", tensor, on_host=compresses)
        if compresses:
            codecs = [self._codec.payloads(each) for each in results]
            out = list(map(staging.write_bytes, results, codecs))
            x = staging.read_bytes(tensor, self._codec.payloads(tensor))
        else:
            out = [staging.write(each) for each in results]
            x = staging.read(tensor)
        call = partial(self._endpoint.communicator.all_gather, x, out=out, check="size")
        return self._endpoint.run(call, options, results, staging)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, **given: Any
    ) -> Operation:
        """Copies each rank's tensor to all ranks, one behind the other in one tensor."""
        options = bare_options(opts, given)
        encoded = self._codec.payloads(input) is not None
        staging = self._endpoint.staging("all_gather", input, on_host=encoded)
        x, out = self._gathered(staging, output, input)
        call = partial(self._endpoint.communicator.all_gather, x, out=out, check="size")
        return self._endpoint.run(call, options, [output], staging)

    def _gathered(
        self, staging: Staging, output: torch.Tensor, given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The arrays to send and to receive when a tensor of all ranks is gathered in one."""
        payloads = self._codec.payloads(given)
        if payloads is None:
            return flat(staging.read(given)), flat(staging.write(output))
        x = staging.read_bytes(given, payloads)
        made = x.new_empty(self._endpoint.communicator.size, x.numel())
        blocks = flat(staging.write(output)).view(len(made), -1)
        for block, payload in zip(blocks, made, strict=True):
            staging.decoded(block, payload, payloads)
        return x, flat(made)

    _allgather_base = all_gather_single

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> Operation:
        """Copies each rank's tensor, of any size, to the root."""
        options = bare_options(opts, given)
        (tensor,), results = _listed(inputs), _nested(outputs)[0] if outputs else []
        staging = self._endpoint.staging("gather", tensor)
        out = [staging.write(each) for each in results] or None
        call = partial(
            self._endpoint.communicator.gather,
            staging.read(tensor),
            root=options.rootRank,
            out=out,
        )
        return self._endpoint.run(call, options, results, staging)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> Operation:
        """Copies one of the root's tensors to each rank."""
        options = bare_options(opts, given)
        (result,), blocks = _listed(outputs), _nested(inputs)[0] if inputs else []
        staging = self._endpoint.staging("scatter", result)
        call = partial(
            self._endpoint.communicator.scatter,
            [staging.read(each) for each in blocks] or None,
            root=options.rootRank,
            out=staging.write(result),
        )
        return self._endpoint.run(call, options, [result], staging)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, **given: Any
    ) -> Operation:
        """Reduces a list of one tensor for each rank, of any sizes; each rank gets its own."""
        options = bare_options(opts, given)
        (result,), (blocks,) = _listed(outputs), _nested(inputs)
        named, dtype = self._codec.reduction(options.reduceOp, *blocks)
        staging = self._endpoint.staging("reduce_scatter", result, named)
        named = staging.averages(named, self._endpoint.communicator.size, [result])
        call = partial(
            self._endpoint.communicator.reduce_scatter,
            [staging.read(each, dtype) for each in blocks],
            out=staging.write(result, dtype),
            check="size",
            **named,
        )
        return self._endpoint.run(call, options, [result], staging)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, **given: Any
    ) -> Operation:
        """Reduces a tensor of one block for each rank; each rank gets its own."""
        options = bare_options(opts, given)
        named, dtype = self._codec.reduction(options.reduceOp, input)
        staging = self._endpoint.staging("reduce_scatter", input, named)
        named = staging.averages(named, self._endpoint.communicator.size, [output])
        call = partial(
            self._endpoint.communicator.reduce_scatter,
            flat(staging.read(input, dtype)),
            out=flat(staging.write(output, dtype)),
            check="size",
            **named,
        )
        return self._endpoint.run(call, options, [output], staging)

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, **given: Any
    ) -> Operation:
        """Sends one tensor, of any size, to each rank, and receives one from each."""
        options = bare_options(opts, given)
        staging = self._endpoint.staging("all_to_all", inputs[0])
        call = partial(
            self._endpoint.communicator.all_to_all,
            [staging.read(each) for each in inputs],
            out=[staging.write(each) for each in outputs],
        )
        return self._endpoint.run(call, options, outputs, staging)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        **given: Any,
    ) -> Operation:
        """Sends one block of a tensor to each rank, and receives one from each; even by default."""
        options = bare_options(opts, given)
        staging = self._endpoint.staging("all_to_all", input)
        size = self._endpoint.communicator.size
        call = partial(
            self._endpoint.communicator.all_to_all,
            _blocks(staging.read(input), input_split_sizes, size, "input"),
            out=_blocks(staging.write(output), output_split_sizes, size, "output"),
        )
        return self._endpoint.run(call, options, [output], staging)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, **given: Any) -> Operation:
        """Returns, or completes, when every rank has called it."""
        options = bare_options(opts, given)
        return self._endpoint.run(self._endpoint.communicator.barrier, options, [])


class _Bare:
    """Options of a call that gives no options object, as C++ and old Python code make it."""

    reduceOp: Any
    rootRank = 0
    timeout: Any = None

    def __init__(self, op: Any, given: dict[str, Any]) -> None:
        self.reduceOp = given.get("op", torch.distributed.ReduceOp.SUM if op is None else op)
        self.rootRank = given.get("root", op if isinstance(op, int) else 0)
        self.timeout = given.get("timeout")


def bare_options(opts: Any, given: dict[str, Any]) -> Any:
    """Torch's options; or options made of a ReduceOp or a root, and of keywords."""
    return opts if hasattr(opts, "timeout") else _Bare(opts, given)


def _listed(tensors: Any) -> list[torch.Tensor]:
    """A list of one tensor; torch's lists of several are for several devices of a rank."""
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(given) != 1:
        raise InvalidArgument(
            f"{len(given)} tensors, and a rank has one in each call: use the coalesced form"
        )
    return given


def _nested(tensors: Any) -> list[list[torch.Tensor]]:
    """A list of one list of tensors; a plain list is taken as the inner one."""
    given = list(tensors)
    if given and isinstance(given[0], torch.Tensor):
        return [given]
    if len(given) != 1:
        raise InvalidArgument(f"{len(given)} lists of tensors, and a rank has one in each call")
    return [list(given[0])]


def _blocks(tensor: torch.Tensor, sizes: Sequence[int], size: int, what: str) -> Any:
    """A contiguous tensor as one dimension, or as blocks of these sizes along its first one."""
    if not sizes:
        if tensor.dim() == 0 or tensor.shape[0] % size:
            raise InvalidArgument(
                f"all_to_all_single: {what} has the shape {tuple(tensor.shape)}, whose first "
                f"dimension cannot be cut into {size} equal blocks: give {what}_split_sizes="
            )
        return flat(tensor)
    if len(sizes) != size or sum(sizes) != tensor.shape[0]:
        raise InvalidArgument(
            f"all_to_all_single: {what}_split_sizes={list(sizes)} is not a size for each of "
            f"{size} ranks that sum to {tensor.shape[0]}"
        )
    return list(tensor.split(list(sizes)))


def _told_by_backward(operation: Operation) -> Operation:
    """Has autograd wait for an operation that began within backward, which then raises its error.

    torch's futures turn every error into a RuntimeError, and DDP waits for futures.
    """
    if torch._C._current_graph_task_id() != -1:
        Variable._execution_engine.queue_callback(operation.wait)
    return operation
