"""Parameters of a model's modules, their shards, and where these lie in FSDP2's buffers.

torch shows none of it. The attributes used here are the same from torch 2.9 to 2.13.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire._errors import Error, InvalidArgument


@dataclasses.dataclass(frozen=True)
class Shard:
    """One parameter, of which each rank has a shard."""

    name: str
    its: Any  # torch's FSDPParam

    @property
    def is_trained(self) -> bool:
        """Whether the parameter gets gradients."""
        return bool(self.its.sharded_param.requires_grad)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        return tuple(self.its.sharded_size)

    @property
    def elements(self) -> int:
        """The elements of this rank's shard."""
        return int(self.its.sharded_size.numel())

    @property
    def padded(self) -> int:
        """The elements of each rank's shard in buffers, where all are as large as the largest."""
        return int(self.its.padded_sharded_param_size.numel())

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the parameter before FSDP sharded it."""
        return tuple(self.its._orig_size)

    @property
    def dim(self) -> int:
        """The dimension along which it is cut."""
        return int(self.its.fsdp_placement.dim)


class ShardedModule:
    """One module that `fully_shard` was called for."""

    def __init__(self, name: str, module: Any, group: Any, shards: Sequence[Shard]) -> None:
        self.name, self.module, self.group, self.shards = name, module, group, shards

    def reduced(self, elements: int) -> list[Shard]:
        """The shards in a buffer of so many elements of each rank, in their order.

        Raises Error unless all parameters that are trained have a gradient: torch leaves the others
        out, and says nowhere which ones they are.
        """
        trained = [each for each in self.shards if each.is_trained]
        expected = sum(each.padded for each in trained)
        if elements != expected:
            raise Error(
                f"module {self.name!r} reduces {elements} elements of each rank, and its "
                f"parameters have {expected}: some have no gradient. Call "
                "model.set_reduce_scatter_unused_params(True) (torch 2.13), with which FSDP gives "
                "them zeros, or freeze them"
            )
        return trained

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that share the parameters."""
        return self.group.mesh_info.shard_process_group

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same shards, in a mesh of two dimensions."""
        return getattr(self._mesh_info, "replicate_process_group", None)

    @property
    def _mesh_info(self) -> Any:
        return self.shards[0].its.mesh_info

    def leave_all_reduce_to_hook(self) -> None:
        """Has FSDP reduce within a replica only, though its mesh has a dimension of replicas.

        torch calls a hook after its own all_reduce between replicas, and can leave that out only
        together with the hook. So its description of the mesh gets one dimension; that of
        parameters and of the DTensors that the program sees stays.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

        group, before = self.group, self.group.mesh_info
        if not hasattr(before, "replicate_process_group"):
            return
        flat = FSDPMeshInfo(mesh=before.mesh, shard_mesh_dim=before.shard_mesh_dim)
        flat.reduce_scatter_process_group = getattr(before, "reduce_scatter_process_group", None)
        if group.post_forward_mesh_info is before:
            group.post_forward_mesh_info = flat
        group.mesh_info = flat


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """The modules of an FSDP model that have parameters of their own.

    Raises InvalidArgument for those whose communication torch does not let replace.
    """
    from torch.distributed.fsdp import FSDPModule  # takes a second to import

    named = dict(model.named_modules())
    found: list[tuple[str, FSDPModule, Any]] = []
    for name, module in named.items():
        if not isinstance(module, FSDPModule):
            continue
        module.reshard()  # parameters are sharded ones then, which have names
        for group in _groups(name, module):
            if all(group is not each for _, _, each in found):
                found.append((name, module, group))
    names = {each: name for name, each in model.named_parameters()}
    return [ShardedModule(*each, _shards(each[2], names)) for each in found]


def _groups(name: str, module: Any) -> Sequence[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # up to torch 2.12
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    if len(groups) > 1:
        raise InvalidArgument(
            f"module {name!r} has {len(groups)} groups of parameters, on meshes of their own, and "
            "torch lets their communication be replaced for one only: call fully_shard() for the "
            "submodules whose shard_placement_fn gives another mesh"
        )
    return [each for each in groups if each.fsdp_params]


def _shards(group: Any, names: Mapping[nn.Parameter, str]) -> list[Shard]:
    return [Shard(names[each.sharded_param], each) for each in group.fsdp_params]


def require_supported(modules: Sequence[ShardedModule]) -> None:
    """Raises InvalidArgument for no parameters, for several meshes, and for another device."""
    if not modules:
        raise InvalidArgument("the model has no parameters that FSDP shards")
    for each in modules:
        if not hasattr(each.shards[0].its.mesh_info, "shard_process_group"):
            raise InvalidArgument(
                f"module {each.name!r} is replicated, not sharded: use DistributedDataParallel and "
                "gradwire.torch.register()"
            )
        if each.group.device.type not in ("cpu", "cuda"):
            raise InvalidArgument(
                f"module {each.name!r} is on {each.group.device}, and register_fsdp() is for "
                "models on the CPU or on CUDA GPUs"
            )
        first = modules[0]
        if each.shard_group is not first.shard_group or (
            each.replicate_group is not first.replicate_group
        ):
            raise InvalidArgument(
                f"modules {first.name!r} and {each.name!r} are sharded over different meshes: "
                "register_fsdp() is for models on one mesh; register the submodules one by one"
            )


class TorchAllocation:
    """A base of custom collectives that has torch's buffers in memory of torch's allocators."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for a buffer of torch's."""
        return torch.empty(*size, dtype=dtype, device=device)


def empty(shape: Sequence[int]) -> torch.Tensor:
    """A tensor of a shape and without memory."""
    return torch.empty(tuple(shape), dtype=torch.float32, device="meta")
