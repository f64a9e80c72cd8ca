"""broadcast_parameters and broadcast_optimizer_state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import broadcast_optimizer_state, broadcast_parameters
from gradwire.torch._ranks.group import communicator_of
from torch import nn
from torch_training import same_everywhere


class Everything(nn.Module):
    """Tensors of many types: tied, empty, not contiguous, without a dimension."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 20))
        self.tied = self.layers[0].weight
        self.brief = nn.Parameter(torch.randn(7).bfloat16())
        self.precise = nn.Parameter(torch.randn(3, 3).double())
        self.pairs = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("across", torch.randn(2, 3).t())
        self.register_buffer("count", torch.randint(100, (), dtype=torch.int64))


def same_state(module: nn.Module) -> bool:
    return same_everywhere(each.flatten() for each in module.state_dict().values())


@pytest.mark.parametrize(("ranks", "root"), [(2, 0), (3, 2)])
@pytest.mark.parametrize("own", [True, False])
@torch_ranks.on_ranks()
def test_parameters_become_those_of_the_root(ranks: int, root: int, own: bool) -> None:
    module = Everything(seed=dist.get_rank())
    strides = module.across.stride()
    differed = not same_state(module)
    communicator = communicator_of(dist.group.WORLD) if own else None
    broadcast_parameters(module.state_dict(), root, ranks=communicator)
    expected = Everything(seed=root).state_dict()
    right = all(each.equal(expected[name]) for name, each in module.state_dict().items())
    broadcast_parameters(list(module.named_parameters()), root, ranks=communicator)
    broadcast_parameters(module.named_parameters(), ranks=communicator)
    assert differed
    assert right
    assert same_state(module)
    assert strides == module.across.stride()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "'a' is torch.float32 of shape (4,) on rank 1 and torch.float32 of shape (3,)"),
        ("type", "'a' is torch.float64 of shape (3,) on rank 1"),
        ("name", "'b' is missing on rank 1 and torch.float32 of shape (2,) on rank 0"),
    ],
)
@torch_ranks.on_ranks(3)
def test_parameters_of_another_model_are_refused_on_all_ranks(what: str, words: str) -> None:
    rank = dist.get_rank()
    tensors: dict[str, Any] = {"a": torch.zeros(3), "b": torch.zeros(2)}
    if rank == 1:
        changed: dict[str, dict[str, Any]] = {
            "shape": {"a": torch.zeros(4), "b": torch.zeros(2)},
            "type": {"a": torch.zeros(3).double(), "b": torch.zeros(2)},
            "name": {"a": torch.zeros(3)},
        }
        tensors = changed[what]
    with pytest.raises(gradwire.InvalidArgument) as raised:
        broadcast_parameters(tensors)
    assert words in str(raised.value)


@torch_ranks.on_ranks(2)
def test_parameters_go_by_their_names() -> None:
    rank = dist.get_rank()
    one, other = torch.full((3,), float(rank)), torch.full((3,), 10.0 + rank)
    named = {"a": one, "b": other} if rank else {"b": other, "a": one}
    broadcast_parameters(named)
    assert [one.tolist(), other.tolist()] == [[0.0] * 3, [10.0] * 3]


def no_parameters() -> list[str]:
    found = []
    sparse = torch.ones(2, 2).to_sparse()
    for each in (nn.Linear(2, 2), None, [1, 2], {"a": 1}, {"a": sparse}, "text"):
        with pytest.raises(gradwire.InvalidArgument) as raised:
            broadcast_parameters(each)
        found.append(str(raised.value))
    return found


def test_what_is_no_parameters_is_refused() -> None:
    (found,) = torch_ranks.run(1, no_parameters)
    assert all("params" in each and "give " in each for each in found)


def test_without_a_process_group_a_communicator_is_asked_for() -> None:
    with pytest.raises(gradwire.InvalidArgument, match="ranks="):
        broadcast_parameters({"a": torch.zeros(1)})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9),
    "AdamW": lambda of: torch.optim.AdamW(of, amsgrad=True),
    "Adagrad": lambda of: torch.optim.Adagrad(of),
    "LBFGS": lambda of: torch.optim.LBFGS(of, history_size=3),
}


def optimizer_of(name: str, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    weights, others = [module[0].weight], [module[0].bias, *module[2].parameters()]
    groups: Any = [{"params": weights}, {"params": others, "lr": 0.05}]
    optimizer = OPTIMIZERS[name](list(module.parameters()) if name == "LBFGS" else groups)
    for step in range(steps):
        train(module, optimizer, step)
    return module, optimizer


def train(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    source = torch.Generator().manual_seed(step)
    x = torch.randn(8, 5, generator=source)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (module(x) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "root", "others"), [(2, 0, 0), (3, 1, 0), (2, 0, 5)])
@torch_ranks.on_ranks()
def test_optimizers_go_on_like_that_of_the_root(
    name: str, ranks: int, root: int, others: int
) -> None:
    rank = dist.get_rank()
    module, optimizer = optimizer_of(name, rank, 3 if rank == root else others)
    optimizer.param_groups[0]["lr"] *= 1 + rank
    groups = [id(each) for each in optimizer.param_groups]
    broadcast_parameters(module.state_dict(), root)
    broadcast_optimizer_state(optimizer, root)
    assert groups == [id(each) for each in optimizer.param_groups]  # to which schedulers refer
    for step in range(3, 6):
        train(module, optimizer, step)
    assert same_state(module)


@torch_ranks.on_ranks(2)
def test_a_root_without_state_lets_the_others_forget_theirs() -> None:
    rank = dist.get_rank()
    _, optimizer = optimizer_of("AdamW", rank, 3 * rank)
    broadcast_optimizer_state(optimizer)
    assert len(optimizer.state) == 0


@torch_ranks.on_ranks(3)
def test_values_of_any_kind_are_those_of_the_root() -> None:
    """Types that load_state_dict() would change, and values that are no tensors."""
    parameter = nn.Parameter(torch.zeros(3).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if dist.get_rank() == 0:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
        optimizer.param_groups[0]["more"] = ("text", {"deep": [torch.tensor([1, 2]), None]})
        optimizer.state[parameter] = {"main": torch.tensor([1.0, 2.0, 3.0]), "name": "it"}
        optimizer.state["all"] = {"count": 7}
    broadcast_optimizer_state(optimizer)
    (group,) = optimizer.param_groups
    state = optimizer.state[parameter]
    text, deep = group["more"]
    expected = [0.25, "text", [1, 2], None, "torch.float32", [1.0, 2.0, 3.0], "it", {"count": 7}]
    assert [
        float(group["lr"]),
        text,
        deep["deep"][0].tolist(),
        deep["deep"][1],
        str(state["main"].dtype),
        state["main"].tolist(),
        state["name"],
        optimizer.state["all"],
        group["params"][0] is parameter,
    ] == [*expected, True]


@torch_ranks.on_ranks(2)
def test_optimizers_of_other_parameters_are_refused_on_all_ranks() -> None:
    rank = dist.get_rank()
    parameters = list(nn.Linear(2, 2).parameters())
    groups: Any = [{"params": [each]} for each in parameters] if rank else parameters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch by torch
        from torch.distributed.optim import ZeroRedundancyOptimizer
    sharded = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    found = []
    for each in (torch.optim.SGD(groups, lr=0.1), torch.optim.SGD, sharded):
        with pytest.raises(gradwire.InvalidArgument) as raised:
            broadcast_optimizer_state(each)
        found.append(str(raised.value))
    regrouped, kind, sharded = found
    assert "rank 1's optimizer has groups of [1, 1] parameters, that of rank 0 has [2]" in regrouped
    assert "optimizer=SGD is a class" in kind
    assert "consolidate_state_dict" in sharded
