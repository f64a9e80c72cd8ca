"""Torch's dispatcher, through which calls of a group written in Python do not go up to torch 2.13.

Torch's own groups make each call an operation of the dispatcher. Modes see it there: CommDebugMode
counts it, FakeTensorMode makes it a call that moves nothing. So while a mode is active, each call
is first made, on tensors without memory, on a group that has no backend and exchanges nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

_c10d = torch._C._distributed_c10d
_shown = (
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    # These have two names, and torch has one or both.
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather_into_tensor_coalesced",
    "alltoall_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)
_of_lists = (
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_coalesced_",
    "reduce_scatter_tensor_coalesced_",
)
_libraries: list[torch.library.Library] = []  # which take back what they define when they end


def show_calls(group_class: type) -> None:
    """Has every instance of a class of groups show its calls to the modes that are active."""
    _stand_in_for_lists()
    for name in _shown:
        if hasattr(dist.ProcessGroup, name):
            setattr(group_class, name, _showing(name, getattr(group_class, name)))


def _showing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: Any, *args: Any, **named: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():
            return method(group, *args, **named)
        exchanges_nothing = getattr(dist.ProcessGroup(group.rank(), group.size()), name)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return exchanges_nothing(*args, **named)
        with _disable_current_modes():
            shown = tree_map_only(torch.Tensor, _without_memory, (args, named))
        exchanges_nothing(*shown[0], **shown[1])
        return method(group, *args, **named)

    return call


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _stand_in_for_lists() -> None:
    """Adds the operations on lists, which torch does not have for tensors without memory."""
    library = torch.library.Library("c10d", "IMPL")
    for name in _of_lists:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            library.impl(name, lambda *_: _c10d.FakeWork().boxed(), "Meta")
    _libraries.append(library)


def call_methods() -> None:
    """Has two functional collectives call a group's methods as Python names them.

    Torch calls others there, which Python cannot override.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    for device in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, device)
    if hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):
        library.impl("batch_p2p_ops", _batch_p2p_ops, "CPU")
    _libraries.append(library)


def _all_gather_into_tensor_out(
    x: torch.Tensor,
    group_size: int,  # noqa: ARG001
    group_name: Any,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    _c10d._register_work(out, _group(group_name)._allgather_base(out, x))
    return out


def _batch_p2p_ops(
    ops: list[str], peers: list[int], tags: list[int], tensors: list[torch.Tensor], group_name: Any
) -> list[torch.Tensor]:
    group, results = _group(group_name), []
    for op, peer, tag, tensor in zip(ops, peers, tags, tensors, strict=True):
        sends = op == "isend"
        work = (group.send if sends else group.recv)([tensor], peer, tag)
        results.append(tensor.new_empty(0) if sends else tensor)
        _c10d._register_work(results[-1], work)
    return results


def _group(name: Any) -> Any:
    """The group of a name, which may be the group from torch 2.13 on."""
    if isinstance(name, str):
        return _c10d._resolve_process_group(name)
    return dist.ProcessGroup.unbox(name)
