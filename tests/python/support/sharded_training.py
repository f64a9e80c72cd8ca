"""Models that FSDP2 shards, their training, and books of what their reductions take and give."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from gradwire.torch import FSDPState, register_fsdp
from gradwire.torch.fsdp.shards import ShardedModule, sharded_modules
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from trainer_options import grouped


def meshes() -> dict[str, DeviceMesh]:
    """A mesh of one dimension, and one with two replicas."""
    size = dist.get_world_size()
    return {
        "sharded": init_device_mesh("cpu", (size,)),
        "replicas": init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")),
    }


def own_mesh() -> DeviceMesh:
    """A mesh over a group of its own, for a test after which it is lost."""
    return DeviceMesh.from_group(dist.new_group(), "cpu")


def layers() -> nn.Sequential:
    """Layers whose parameters cannot be cut evenly."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 90), nn.Tanh(), nn.Linear(90, 70), nn.ReLU(), nn.Linear(70, 10)
    )


def sharded(mesh: DeviceMesh, make: Callable[[], nn.Module] = layers, **options: Any) -> Any:
    """A model whose layers FSDP gathers one by one."""
    module = make()
    for each in module.children():
        if any(True for _ in each.parameters()):
            fully_shard(each, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def registered(mesh: DeviceMesh, codec: Any, **options: Any) -> tuple[Any, FSDPState]:
    """A sharded model, and its hooks' state; small layers are compressed too."""
    module = sharded(mesh)
    settings = {"codec": codec, "min_elements": 0, "warm_up": 0, **options}
    return module, register_fsdp(module, **grouped(**settings))


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    own = dist.get_rank() if rank is None else rank
    source = torch.Generator().manual_seed(1000 * step + own)
    x = torch.randn(16, 20, generator=source)
    return x, x[:, :10].clone()


def backward(module: nn.Module, step: int, scale: float = 1.0) -> torch.Tensor:
    x, y = batch(step)
    loss = mse_loss(module(x).float(), y)
    (loss * scale).backward()
    return loss.detach()


def train(module: nn.Module, steps: range, lr: float = 0.1) -> float:
    """The mean loss of all ranks in the last step."""
    optimizer = torch.optim.SGD(module.parameters(), lr, momentum=0.9)
    loss = torch.zeros(())
    for step in steps:
        optimizer.zero_grad()
        loss = backward(module, step)
        optimizer.step()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return float(loss)


def shards(module: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of the parameters."""
    return [each.to_local().detach() for each in module.parameters()]


def agree(tensors: Iterable[torch.Tensor], group: Any = None) -> bool:
    """Whether they have the same bits on all ranks of a group."""
    own = hashlib.sha256()
    for each in tensors:
        own.update(each.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own.hexdigest(), group=group)
    return len(set(found)) == 1


class Books:
    """Sums, in float64, of what one model's reductions take and give.

    Conservation: ranks × what was delivered + all ranks' residuals = all that went in.
    """

    def __init__(self, module: Any) -> None:
        self._taken: dict[int, torch.Tensor] = {}
        self._given: dict[int, torch.Tensor] = {}
        self.modules = sharded_modules(module)
        for each in self.modules:
            self.wrap(each)

    def wrap(self, module: ShardedModule) -> None:
        """Puts the books around a module's hook, again after a new registration."""
        group, index = module.group, self.modules.index(module)
        if module.replicate_group is None:
            group._reduce_scatter_comm = _Scatter(self, index, group._reduce_scatter_comm)
        else:
            group._all_reduce_hook = self._around(index, group._all_reduce_hook)

    def note(self, index: int, taken: torch.Tensor, given: torch.Tensor) -> None:
        for book, each in ((self._taken, taken), (self._given, given)):
            book[index] = book.get(index, torch.zeros_like(each).double()) + each.double()

    def _around(self, index: int, hook: Any) -> Any:
        def reduce(output: torch.Tensor) -> None:
            before = output.clone()
            hook(output)
            self.note(index, before, output)

        return reduce

    def error(self, state: FSDPState) -> float:
        """The largest difference, relative to the largest of all that went in."""
        return max(self._error(index, state) for index in range(len(self.modules)))

    def _error(self, index: int, state: FSDPState) -> float:
        module, size = self.modules[index], state.communicator.size
        assert state.feedback is not None
        keys = [f"{each.name}[{r}]" for r in range(size) for each in module.shards]
        if module.replicate_group is not None:
            keys = [each.name for each in module.shards]
        padded = [each.padded for each in module.shards] * (len(keys) // len(module.shards))
        kept = [state.feedback.residual(key) for key in keys]
        residual = torch.cat(
            [
                nn.functional.pad(torch.from_numpy(each).double(), (0, size - len(each)))
                for each, size in zip(kept, padded, strict=True)
            ]
        )
        taken = self._taken[index].clone()
        delivered = self._given[index] * size
        if module.replicate_group is None:
            delivered = torch.from_numpy(state.communicator.all_gather(delivered.numpy()))
        for each in (taken, residual):
            state.communicator.all_reduce(each)
        return float((taken - delivered - residual).abs().max() / taken.abs().max())


class _Scatter:
    """A reduce_scatter of torch's that keeps books."""

    def __init__(self, books: Books, index: int, its: Any) -> None:
        self._books, self._index, self._its = books, index, its
        self.allocate = its.allocate

    def __call__(self, **arguments: Any) -> None:
        taken = arguments["input_tensor"].clone()
        self._its(**arguments)
        self._books.note(self._index, taken, arguments["output_tensor"])
