"""Broadcasts of a model's parameters and of an optimizer's state, before training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradwire._base.arguments import wrong
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire.torch._ranks.ranks import RanksLike, ranks_of

_OTHERS = "other objects travel by Communicator.broadcast_object()"


def broadcast_parameters(
    params: Mapping[str, torch.Tensor | None] | Iterable[tuple[str, torch.Tensor | None]],
    root: int = 0,
    *,
    ranks: RanksLike = None,
) -> None:
    """Gives all ranks the root's tensors, in place; every rank calls it.

    `params` is ``model.state_dict()`` or ``model.named_parameters()``: dense tensors of any type
    and shape, on the CPU or a GPU; None values are skipped. `ranks` are torch's default group if
    None, over which a communicator is made for this call; see `Ranks`. Raises InvalidArgument on
    all ranks when names, types or shapes differ from the root's.
    """
    tensors = _named(params)
    with _connected(ranks) as comm:
        own = {name: (str(each.dtype), tuple(each.shape)) for name, each in tensors.items()}
        roots = comm.broadcast_object(own, root=root)
        _raise_on_all(comm, _difference(own, roots, comm.rank, root))
        _broadcast(comm, [tensors[name] for name in roots], root)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root: int = 0, *, ranks: RanksLike = None
) -> None:
    """Gives all ranks the state and options (``lr``, ...) of the root's optimizer; all call it.

    The other ranks' optimizers may be fresh, or have a state, which is replaced. Tensors get the
    root's types; everything else travels by pickle (see `Communicator.broadcast_object`), so use it
    only between ranks that trust each other. `ranks` are as in `broadcast_parameters`. Raises
    InvalidArgument on all ranks when parameters are grouped differently from the root's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise wrong(optimizer, "optimizer", "an optimizer of torch's")
    # Compared by name: its module takes long to import, and warns.
    if any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__):
        raise InvalidArgument(
            "a ZeroRedundancyOptimizer has another part of the state on each rank: save it with "
            "consolidate_state_dict() and load_state_dict()"
        )
    with _connected(ranks) as comm:
        tensors: list[torch.Tensor] = []
        own = _snapshot(optimizer, tensors) if comm.rank == root else None
        roots: _Snapshot = comm.broadcast_object(own, root=root)
        _raise_on_all(comm, _regrouped(optimizer, roots, comm.rank, root))
        if comm.rank != root:
            tensors = [each.empty() for each in roots.slots]
        _broadcast(comm, tensors, root)
        if comm.rank != root:
            _restore(optimizer, roots, tensors)


class _Slot(NamedTuple):
    """A placeholder for a tensor in a snapshot."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str  # its type

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class _Snapshot(NamedTuple):
    """An optimizer's options and state, with slots for tensors and numbers for parameters."""

    sizes: list[int]  # numbers of parameters by group
    options: list[dict[str, Any]]
    by_parameter: dict[int, Any]
    others: dict[Any, Any]  # state under keys other than parameters
    slots: list[_Slot]


def _snapshot(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> _Snapshot:
    """Takes a snapshot; appends the tensors to the list, in the order of their slots."""
    number = {each: i for i, each in enumerate(_parameters(optimizer))}
    slots: list[_Slot] = []

    def take(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return mapped(value, take)
        slot = _Slot(len(slots), value.dtype, tuple(value.shape), value.device.type)
        slots.append(slot)
        tensors.append(value.detach())
        return slot

    groups = [dict(each) for each in optimizer.param_groups]
    sizes = [len(each.pop("params")) for each in groups]
    state = optimizer.state.items()
    return _Snapshot(
        sizes,
        [take(each) for each in groups],
        {number[key]: take(dict(each)) for key, each in state if key in number},
        {key: take(each) for key, each in state if key not in number},
        slots,
    )


def _restore(
    optimizer: torch.optim.Optimizer, its: _Snapshot, tensors: Sequence[torch.Tensor]
) -> None:
    def fill(value: Any) -> Any:
        return tensors[value.number] if isinstance(value, _Slot) else mapped(value, fill)

    for group, options in zip(optimizer.param_groups, its.options, strict=True):
        parameters = group["params"]
        group.clear()
        group.update(fill(options), params=parameters)
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for number, each in its.by_parameter.items():
        optimizer.state[parameters[number]] = fill(each)
    optimizer.state.update({key: fill(each) for key, each in its.others.items()})


def mapped(value: Any, change: Any) -> Any:
    """Copies a container with `change` applied to each value; returns anything else unchanged."""
    if type(value) is dict:
        return {key: change(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(each) for each in value)
    return value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _regrouped(optimizer: torch.optim.Optimizer, roots: _Snapshot, rank: int, root: int) -> str:
    own = [len(group["params"]) for group in optimizer.param_groups]
    if own == roots.sizes:
        return ""
    return (
        f"rank {rank}'s optimizer has groups of {own} parameters, that of rank {root} has "
        f"{roots.sizes}"
    )


def _named(params: Any) -> dict[str, torch.Tensor]:
    """Tensors by name, each memory once: tied parameters have two names in a state_dict."""
    wanted = "model.state_dict() or model.named_parameters()"
    if isinstance(params, torch.nn.Module | torch.Tensor | str):
        raise wrong(params, "params", wanted)
    try:
        pairs = dict(params)
    except (TypeError, ValueError):
        raise wrong(params, "params", wanted) from None
    found: dict[str, torch.Tensor] = {}
    known = set()
    for name, each in pairs.items():
        if each is None:
            continue
        if not isinstance(each, torch.Tensor) or each.layout is not torch.strided:
            raise wrong(each, f"params[{name!r}]", f"a dense tensor; {_OTHERS}")
        memory = (each.data_ptr(), each.shape, each.stride(), each.dtype)
        if memory not in known or not each.numel():
            found[name] = each.detach()
        known.add(memory)
    return found


def _difference(own: dict[str, Any], roots: dict[str, Any], rank: int, root: int) -> str:
    names = [*own, *(name for name in roots if name not in own)]
    name = next((name for name in names if own.get(name) != roots.get(name)), None)
    if name is None:
        return ""
    mine, its = (_shown(each.get(name)) for each in (own, roots))
    return f"{name!r} is {mine} on rank {rank} and {its} on rank {root}"


def _shown(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if kind is None else f"{kind[0]} of shape {kind[1]}"


def _raise_on_all(communicator: Communicator, fault: str) -> None:
    faults = [each for each in communicator.all_gather_object(fault) if each]
    if faults:
        raise InvalidArgument(f"the ranks' tensors differ: {'; '.join(faults)}")


def _broadcast(communicator: Communicator, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Broadcasts tensors as bytes: one operation for those on the CPU, one for those on a GPU."""
    for kind in dict.fromkeys(each.device.type for each in tensors):
        found = [each for each in tensors if each.device.type == kind and each.numel()]
        sent = [each.contiguous() for each in found]
        if sent:
            communicator.broadcast([_bytes(each) for each in sent], root=root)
        for each, received in zip(found, sent, strict=True):
            if each is not received:
                each.copy_(received)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's memory as bytes."""
    return tensor.view(-1).view(torch.uint8)


@contextlib.contextmanager
def _connected(ranks: RanksLike) -> Iterator[Communicator]:
    communicator, owns = ranks_of(ranks).connect(alone=True)
    with communicator if owns else contextlib.nullcontext():
        yield communicator
