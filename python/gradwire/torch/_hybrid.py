"""parallelize: data parallelism, and large linear layers split over the ranks.

Data parallelism sends as much as a model has weights, Σ|W|. A layer that is split sends its
activations of the whole batch, Σ|D|, and no weights: less where a layer has many weights, as large
linear layers have, and convolutions have not (Krizhevsky 2014, "One weird trick for parallelizing
convolutional neural networks"; Iandola et al. 2016, "FireCaffe", sec. 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire._base.arguments import whole
from gradwire._errors import InvalidArgument
from gradwire.torch._plans import (
    DATA,
    MODEL,
    checked_plan,
    is_splittable,
    owners_of,
    pairs_of,
    require_plain,
)
from gradwire.torch.backend import versions

_WRAPPERS = ("ddp", "fsdp")


def hybrid_plan(model: nn.Module, size: int, *, min_elements: int = 1 << 20) -> dict[str, str]:
    """Proposes a plan for `parallelize`: "data" or "model" for each layer that has parameters.

    Linear layers whose weight is trained, is no other layer's too and has at least `min_elements`
    elements, and whose number of outputs can be divided by `size`, the number of ranks, are
    "model". Splitting a layer saves bytes where its weight has more elements than its inputs and
    outputs of the batches of all ranks. Raises InvalidArgument for a model that is wrapped or
    compiled already.
    """
    require_plain(model)
    whole(size, "size", least=1)
    whole(min_elements, "min_elements")
    owners = owners_of(model)
    return {
        name: MODEL
        if _is_large(module, size, min_elements) and is_splittable(name, module, owners)
        else DATA
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }


def _is_large(module: nn.Module, size: int, least: int) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.requires_grad
        and module.weight.numel() >= least
        and module.out_features % size == 0
    )


def parallelize(
    model: nn.Module,
    plan: Mapping[str, str] | None = None,
    mesh: Any = None,
    *,
    data: str = "ddp",
    **options: Any,
) -> nn.Module:
    """Applies a plan: splits linear layers over the ranks, and makes the others data-parallel.

    Every rank calls it with the same model and plan, and trains what it returns as it would train
    a DistributedDataParallel model: with batches of its own, of one size on all ranks. Losses are
    means over a rank's batch; gradients are averages over all ranks. Parameters begin as rank 0's.

    `plan` names layers, as `model.named_modules()` does: those with "model" are split, and must be
    nn.Linear; those with "data" and those without a name in it are data-parallel. None is
    `hybrid_plan(model, mesh.size())`. Two linear layers with only activations and dropout between
    them, in one nn.Sequential, keep what is between them split. Dropout there needs another seed on
    each rank. `mesh` is a DeviceMesh of one dimension; all ranks if None.

    `data` is "ddp" or "fsdp", for DistributedDataParallel or FSDP2's fully_shard, which take the
    other `options`. With "ddp" what is returned takes the hook of `register`, whose codec then
    compresses the gradients of the data-parallel layers.

    Needs torch 2.7 or later, and any backend. Raises InvalidArgument for a plan that cannot be
    applied or that differs between ranks, before the model is changed.
    """
    _require_usable(data)
    require_plain(model)
    mesh = _checked_mesh(model, mesh)
    plan = hybrid_plan(model, mesh.size()) if plan is None else plan
    split = _agreed(model, plan, mesh, data)
    _split(model, split, mesh)
    ignored = {f"{name}.{each}".lstrip(".") for name in split for each in ("weight", "bias")}
    if not any(p.requires_grad for n, p in model.named_parameters() if n not in ignored):
        _begin_alike(model, mesh)
        return model  # nothing is data-parallel
    wrap = _under_ddp if data == "ddp" else _under_fsdp
    return wrap(model, ignored, mesh, options)


def _require_usable(data: str) -> None:
    if data not in _WRAPPERS:
        raise InvalidArgument(f"data={data!r}: give 'ddp' or 'fsdp'")
    if versions.parse(torch.__version__) < versions.OLDEST:
        oldest = ".".join(map(str, versions.OLDEST))
        raise InvalidArgument(f"parallelize() needs torch {oldest} or later: {torch.__version__}")
    if not dist.is_initialized():
        raise InvalidArgument("call torch.distributed.init_process_group('gradwire') first")


def _checked_mesh(model: nn.Module, mesh: Any) -> Any:
    """The mesh, or one of all ranks."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if mesh is None:
        device = next((each.device.type for each in model.parameters()), "cpu")
        return init_device_mesh(device, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise InvalidArgument(
            f"mesh={mesh!r} is not a DeviceMesh of one dimension: give one of all ranks that train "
            "together, over which layers are data-parallel or split"
        )
    return mesh


def _agreed(model: nn.Module, plan: Any, mesh: Any, data: str) -> list[str]:
    """The layers to split, in the model's order; raises on all ranks if one rank's plan is bad.

    And if the ranks gave another plan, or another `data`.
    """
    split, failure = list[str](), None
    try:
        split = checked_plan(model, plan, mesh.size())
    except InvalidArgument as error:
        failure = error
    every: list[Any] = [None] * mesh.size()
    dist.all_gather_object(every, (str(failure or ""), split, data), group=mesh.get_group())
    if failure is not None:
        raise failure
    for rank, (why, its, way) in enumerate(every):
        if why:
            raise InvalidArgument(f"parallelize() failed on rank {rank}: {why}")
        if way != every[0][2]:
            raise InvalidArgument(
                f"parallelize() was called with data={every[0][2]!r} on rank 0 and {way!r} on rank "
                f"{rank}: give the same on all ranks"
            )
        if its != every[0][1]:
            raise InvalidArgument(
                f"the plan splits {every[0][1]} on rank 0 and {its} on rank {rank}: give the same "
                "plan on all ranks"
            )
    return split


def _split(model: nn.Module, split: Iterable[str], mesh: Any) -> None:
    """Puts each layer's weights and calls under tensor parallelism."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    pairs = pairs_of(model, split)
    seconds = set(pairs.values())
    by_sample, by_feature = Shard(0), Shard(-1)
    for name in split:
        layer = model.get_submodule(name)
        if name in seconds:
            style = RowwiseParallel(input_layouts=by_feature, output_layouts=by_sample)
        else:
            out = by_feature if name in pairs else by_sample
            style = ColwiseParallel(input_layouts=by_sample, output_layouts=out)
        parallelize_module(layer, mesh, style)
        # Torch's outputs are views, which nothing may change in place.
        layer.register_forward_hook(lambda _, __, output: output.clone())
        for parameter in layer.parameters():
            _average(parameter, mesh.size())


def _average(parameter: nn.Parameter, size: int) -> None:
    """Makes gradients averages: they come as sums over ranks, of losses that are means on each."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_()  # a frozen one, which may be thawed later, takes no hook
    parameter.register_hook(lambda gradient: gradient / size)
    parameter.requires_grad_(is_trained)


def _begin_alike(model: nn.Module, mesh: Any) -> None:
    """Gives all ranks rank 0's parameters and buffers, but for those that are split or sharded."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            if not isinstance(each, DTensor):
                dist.broadcast(each, group=mesh.get_group(), group_src=0)


def _under_ddp(model: nn.Module, ignored: set[str], mesh: Any, options: Any) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model, process_group=mesh.get_group(), **options)


def _under_fsdp(model: nn.Module, ignored: set[str], mesh: Any, options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    _begin_alike(model, mesh)
    split = {parameter for name, parameter in model.named_parameters() if name in ignored}
    fully_shard(model, mesh=mesh, ignored_params=split, **options)
    return model
