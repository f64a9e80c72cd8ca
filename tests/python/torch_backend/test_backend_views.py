"""Views that torch conjugates or negates when they are read: calls see what the program sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch_pool import on_ranks
from torch_versions import WRAPS

LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": torch.conj,
    "negated": torch._neg_view,
}


def values(kind: str) -> torch.Tensor:
    """Of this rank: other ones on each, for as many blocks as there are ranks."""
    made = torch.arange(4.0 * dist.get_world_size()) + 10 * dist.get_rank() + 1
    return torch.complex(made, 2 * made) if kind == "conjugated" else made


def lists(x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.chunk(dist.get_world_size()))


def scattered(group: Any, out: torch.Tensor, x: torch.Tensor) -> Any:
    whole = [lists(x)] if dist.get_rank() == 0 else []
    return group.scatter([lists(out)[0]], whole, c10d.ScatterOptions())


def sent(group: Any, out: torch.Tensor, x: torch.Tensor) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    receive = group.recv([out], (rank - 1) % size, 0)
    group.send([x], (rank + 1) % size, 0).wait()
    return receive


# Calls that read `x` and write `out`, or `out` alone, as torch makes them in C++: its functions in
# Python refuse conjugated tensors in many places.
CALLS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "all_reduce": lambda group, out, _: group.allreduce([out], c10d.AllreduceOptions()),
    "reduce": lambda group, out, _: group.reduce([out], c10d.ReduceOptions()),
    "broadcast": lambda group, out, _: group.broadcast([out], c10d.BroadcastOptions()),
    "all_gather": lambda group, out, x: group.allgather([lists(out)], [lists(x)[0]]),
    "all_to_all": lambda group, out, x: group.alltoall_base(out, x, [], []),
    "scatter": scattered,
    "send and recv": sent,
}


def result(name: str, kind: str, of_out: bool, of_x: bool) -> torch.Tensor:
    """What a call leaves in `out`, with views on the first rank for one or the other."""
    out, x = (LAZY[kind](values(kind)) * factor for factor in (1, 3))
    first = dist.get_rank() == 0  # the same change on all ranks could cancel out
    if of_out and first:
        out = LAZY[kind](values(kind))
    if of_x and first:
        x = LAZY[kind](3 * values(kind))
    assert (out.is_conj() or out.is_neg()) == (of_out and first)
    CALLS[name](dist.group.WORLD, out, x).wait()
    return out


@pytest.mark.skipif(
    WRAPS, reason="this torch gives every backend a copy, and reads it before the call has ended"
)
@pytest.mark.parametrize("kind", LAZY)
@on_ranks
def test_calls_on_a_view_do_what_they_do_on_a_copy(kind: str) -> None:
    for name in CALLS:
        wanted = result(name, kind, False, False)
        for views in (True, False), (False, True):
            found = result(name, kind, *views)
            assert name == "reduce" or torch.equal(found, wanted), (name, views)
            assert dist.get_rank() or torch.equal(found, wanted), (name, views)
