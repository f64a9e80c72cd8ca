"""all_reduce of sparse tensors: indices and values are gathered, and every rank adds them up."""

from __future__ import annotations

from typing import Any

import torch

from gradwire._errors import InvalidArgument
from gradwire.torch.backend.endpoint import Endpoint
from gradwire.torch.backend.operations import Operation, Several
from gradwire.torch.backend.reductions import keywords

_OPS = ("sum", "avg")


def all_reduce_sparse(endpoint: Endpoint, tensor: torch.Tensor, options: Any) -> Operation:
    """Sums or averages a tensor in coordinate format over all ranks, in place.

    Waits until all ranks have told how many elements they have. The sum is coalesced, and has the
    same bits on every rank: it is formed in the order of ranks.
    """
    op = keywords(options.reduceOp)
    if op["op"] not in _OPS or "prescale" in op:
        raise InvalidArgument(f"op={options.reduceOp}: a sparse tensor can be summed or averaged")
    if op["op"] == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise InvalidArgument(
            f"op 'avg' of {tensor.dtype} is not defined: divide the sum, or average floats"
        )
    comm, timeout = endpoint.communicator, endpoint.seconds(options)
    staging = endpoint.staging("all_reduce of sparse tensors", tensor)
    own = tensor.detach().cpu().coalesce()
    indices, values = own.indices().t().contiguous(), own.values().contiguous()
    count = torch.tensor([len(values)], dtype=torch.int64, device="cpu")
    counts = comm.all_gather(count, timeout=timeout).tolist()
    all_indices = [indices.new_empty(count, indices.shape[1]) for count in counts]
    all_values = [values.new_empty(count, *values.shape[1:]) for count in counts]
    works = [
        comm.all_gather(each, out=out, check="size", async_op=True, timeout=timeout)
        for each, out in ((indices, all_indices), (values, all_values))
    ]

    def finish() -> None:
        summed = torch.cat(all_values)
        if op["op"] == "avg":
            summed = summed / comm.size
        made = torch.sparse_coo_tensor(
            torch.cat(all_indices).t(),
            summed,
            tensor.shape,
            device=summed.device,
            check_invariants=True,
        )
        with torch.no_grad():
            tensor.copy_(made.coalesce().to(tensor.device))

    staging.at_the_end(finish)
    return endpoint.operation(Several(works), [tensor], staging)
