"""FSDP2 in codecs: checkpoints, other numbers of ranks, AMP, accumulation, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire import InvalidArgument
from gradwire.torch import (
    Compression,
    FSDPState,
    Stages,
    gather_state_dict,
    register_fsdp,
    scatter_state_dict,
)
from sharded_training import (
    Books,
    backward,
    batch,
    layers,
    meshes,
    own_mesh,
    registered,
    sharded,
    shards,
    train,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_pool import on_ranks
from torch_versions import has_fsdp_hooks

pytestmark = has_fsdp_hooks
CODECS = (
    *("onebit", "topk:density=0.05", "int8:rounding=stochastic"),
    Stages((0, "int8"), (4, "onebit")),
)


def file_of(state: FSDPState) -> Any:
    """The state as a file gives it back."""
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@on_ranks
def test_resumed_training_equals_uninterrupted() -> None:
    for mesh, codec, dtype in product(meshes().values(), CODECS, ("float32", "bfloat16")):
        if dtype == "float32" or codec == "onebit":
            whole, state = registered(mesh, codec, feedback=gradwire.ErrorFeedback(dtype))
            train(whole, range(3))
            saved, weights = file_of(state), whole.state_dict()
            weights = {name: each.clone() for name, each in weights.items()}
            train(whole, range(3, 6))
            state.close()
            again, its = registered(mesh, codec, feedback=gradwire.ErrorFeedback(dtype))
            again.load_state_dict(weights)
            its.load_state_dict(saved)
            train(again, range(3, 6))
            assert its.steps == 6
            for one, other in zip(shards(whole), shards(again), strict=True):
                assert torch.equal(one, other), codec
            its.close()


@on_ranks
def test_torchs_distributed_checkpoints(tmp_path: Path) -> None:
    folder = str(tmp_path)
    import torch.distributed.checkpoint as dcp

    for name, mesh in meshes().items():
        module, state = registered(mesh, "onebit")
        train(module, range(2))
        key = f"gradwire-{dist.get_rank()}"
        torch.save(state.state_dict(), file := io.BytesIO())
        dcp.save({"model": module.state_dict(), key: file}, checkpoint_id=f"{folder}/{name}")
        again, its = registered(mesh, "onebit")
        found = {"model": again.state_dict(), key: io.BytesIO()}
        dcp.load(found, checkpoint_id=f"{folder}/{name}")
        again.load_state_dict(found["model"])
        found[key].seek(0)
        its.load_state_dict(torch.load(found[key], weights_only=True))
        for each in (module, again):
            train(each, range(2, 4))
        for one, other in zip(shards(module), shards(again), strict=True):
            assert torch.equal(one, other)
        state.close()
        its.close()


def residual_sums(state: FSDPState, group: Any = None) -> dict[str, torch.Tensor]:
    """The sum of all ranks' residuals, by parameter."""
    assert state.feedback is not None
    found = {}
    for each in state._shards:
        size = state.communicator.size
        keys = [f"{each.name}[{r}]" for r in range(size)]
        parts = [torch.from_numpy(state.feedback.residual(key)) for key in keys]
        part_shape = list(each.whole_shape)
        part_shape[each.dim] = -1
        whole = torch.cat([part.view(part_shape) for part in parts], each.dim)
        whole = whole.narrow(each.dim, 0, each.whole_shape[each.dim]).contiguous()
        dist.all_reduce(whole, group=group)
        found[each.name] = whole
    return found


def second_dimension(parameter: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 4 == 0 else Shard(0)


@torch_ranks.on_ranks(4, backend="gradwire")
def test_residuals_go_to_another_number_of_ranks() -> None:
    for placement in (None, second_dimension):
        module = sharded(own_mesh(), shard_placement_fn=placement)
        state = register_fsdp(module, Compression("onebit", min_elements=0, warm_up=0))
        train(module, range(3))
        before = residual_sums(state)
        gathered = gather_state_dict(state)
        state.close()
        half = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            smaller = sharded(DeviceMesh.from_group(half, "cpu"), shard_placement_fn=placement)
            its = register_fsdp(smaller, Compression("onebit", min_elements=0, warm_up=0))
            scatter_state_dict(its, gathered)
            for name, whole in residual_sums(its, half).items():
                assert torch.allclose(whole, before[name] / 2, atol=1e-6), name
            its.close()
        dist.barrier()


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [each.grad.to_local() for each in module.parameters()]


@on_ranks
def test_what_more_ranks_kept_is_delivered_by_one() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mesh = DeviceMesh.from_group(groups[dist.get_rank()], "cpu")
    module, state = registered(mesh, "onebit")
    plain = sharded(mesh)
    assert state.feedback is not None
    state.feedback.add("0.bias[0]", torch.ones(90).numpy())
    for each in (module, plain):
        backward(each, 0)
    for ours, theirs in zip(gradients(module), gradients(plain), strict=True):
        assert torch.allclose(ours, theirs + (ours.shape == (90,)))
    assert state.steps == 1
    again = register_fsdp(module, Compression("onebit", min_elements=0, warm_up=0))
    backward(module, 1)
    assert (state.steps, again.steps) == (1, 1)
    again.close()
    state.close()


@on_ranks
def test_inf_on_one_rank_leaves_the_residuals_of_all() -> None:
    for mesh in meshes().values():
        module, state = registered(mesh, "onebit", rules=[("2.*", "none")], feedback=True)
        train(module, range(2))
        before = state.state_dict()["feedback"]
        x, y = batch(2)
        if dist.get_rank() == 1:
            x[0, 0] = torch.inf
        nn.functional.mse_loss(module(x), y).backward()
        after = state.state_dict()["feedback"]
        assert state.stats().last.kept == 0
        assert before.keys() == after.keys()
        for key, kept in before.items():
            assert torch.equal(kept["residual"], after[key]["residual"])
        state.close()


@on_ranks
def test_residuals_follow_the_loss_scale_and_the_rate() -> None:
    """With residuals that follow the loss scale, scaled gradients sum up to unscaled ones."""
    for mesh in meshes().values():
        runs = []
        for init_scale in (1.0, 2.0**10):
            module = sharded(mesh)
            scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            state = register_fsdp(
                module,
                Compression("onebit", min_elements=0, warm_up=0),
                scaler=scaler,
                optimizer=optimizer,
            )
            for step in range(6):
                optimizer.zero_grad()
                x, y = batch(step)
                scaler.scale(nn.functional.mse_loss(module(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step // 2)
            runs.append(shards(module))
            assert state.state_dict()["loss_scale"] == init_scale * 4
            state.close()
        for one, other in zip(*runs, strict=True):  # scales are powers of two
            assert torch.equal(one, other)


@on_ranks
def test_gradient_accumulation() -> None:
    for name, mesh in meshes().items():
        module, state = registered(mesh, "onebit", feedback=True)
        books = Books(module)
        for step in range(3):
            module.set_requires_gradient_sync(False)
            backward(module, 2 * step)
            assert state.steps == step
            module.set_requires_gradient_sync(True)
            backward(module, 2 * step + 1)
        assert state.steps == 3
        assert books.error(state) < 1e-5
        state.close()
        if name == "sharded":
            continue
        sums = []
        for late in (False, True):
            module, state = registered(mesh, "none")
            module.set_requires_all_reduce(not late)
            backward(module, 0)
            module.set_requires_all_reduce(True)
            backward(module, 1)
            assert state.steps == (1 if late else 2)
            sums.append([each.grad.to_local() for each in module.parameters()])
            state.close()
        for one, other in zip(*sums, strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@on_ranks
def test_divide_factors() -> None:
    size = dist.get_world_size()
    for mesh in meshes().values():
        grads = []
        for factor in (None, 2.0 * size):
            module, state = registered(mesh, "none")
            if factor is not None:
                for each in module.modules():
                    if hasattr(each, "set_gradient_divide_factor"):
                        each.set_gradient_divide_factor(factor)
            backward(module, 0)
            grads.append([each.grad.to_local() for each in module.parameters()])
            state.close()
        for one, other in zip(*grads, strict=True):
            assert torch.allclose(one, 2 * other, atol=1e-7)


class Branches(nn.Module):
    """Uses one of its two branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used, self.unused = nn.Linear(20, 10), nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@on_ranks
def test_unused_and_frozen_parameters() -> None:
    module = fully_shard(Branches(), mesh=own_mesh())
    state = register_fsdp(module, Compression("onebit", min_elements=0, warm_up=0))
    with pytest.raises(gradwire.Error, match="set_reduce_scatter_unused_params"):
        backward(module, 0)
    state.close()
    module = fully_shard(Branches(), mesh=own_mesh())
    if hasattr(module, "set_reduce_scatter_unused_params"):  # of torch 2.13
        module.set_reduce_scatter_unused_params(True)
        state = register_fsdp(module, Compression("onebit", min_elements=0, warm_up=0))
        books = Books(module)
        for step in range(4):
            backward(module, step)
        assert books.error(state) < 1e-5
        state.close()
    module = fully_shard(Branches(), mesh=own_mesh())
    module.unused.requires_grad_(False)
    state = register_fsdp(module, Compression("onebit", min_elements=0, warm_up=0))
    backward(module, 0)
    assert state.feedback is not None
    assert not any(key.startswith("unused") for key in state.feedback.keys())  # noqa: SIM118
    state.close()


@on_ranks
def test_a_paused_backward_keeps_nothing() -> None:
    for mesh in meshes().values():
        module, state = registered(mesh, "onebit")
        backward(module, 0)
        before = state.state_dict()["feedback"]
        with state.paused():
            backward(module, 1)
        assert state.steps == 1
        after = state.state_dict()["feedback"]
        for key, kept in before.items():
            assert torch.equal(kept["residual"], after[key]["residual"])
        state.close()


@on_ranks
def test_registered_again() -> None:
    """Residuals go on in the next registration, or begin anew; a closed state raises."""
    for mesh in meshes().values():
        module, state = registered(mesh, "onebit")
        books = Books(module)
        train(module, range(2))
        state.close()
        again = register_fsdp(
            module,
            Compression("topk:density=0.1", min_elements=0, feedback=state.feedback, warm_up=0),
        )
        for each in books.modules:
            books.wrap(each)
        train(module, range(2, 4))
        assert books.error(again) < 1e-5
        assert again.feedback is not None
        again.feedback.clear()
        train(module, range(4, 5))
        again.close()
    module, state = registered(own_mesh(), "onebit")
    state.close()
    with pytest.raises(gradwire.Aborted, match="register_fsdp"):
        backward(module, 0)


def two_groups(mesh: DeviceMesh, other: DeviceMesh) -> Any:
    """A function that places weights on one mesh and biases on another."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    weights, biases = FSDPMeshInfo(mesh, 0), FSDPMeshInfo(other, 0)

    def place(parameter: nn.Parameter) -> Any:
        info = weights if parameter.dim() == 2 else biases
        return ShardPlacementResult(placement=Shard(0), mesh_info=info)

    return place


@on_ranks
def test_refusals_say_what_to_do() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    mesh, other = own_mesh(), own_mesh()

    def several_groups() -> object:
        placement = two_groups(mesh, other)
        return register_fsdp(fully_shard(layers(), mesh=mesh, shard_placement_fn=placement))

    def several_meshes() -> object:
        module = layers()
        fully_shard(module[0], mesh=other)
        return register_fsdp(fully_shard(module, mesh=mesh))

    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: register_fsdp(layers()), "fully_shard"),
        (lambda: register_fsdp(DistributedDataParallel(layers())), "DistributedDataParallel"),
        (lambda: registered(mesh, "nosuch"), "nosuch"),
        (lambda: registered(mesh, "lowrank"), "mesh of two dimensions"),
        (lambda: registered(mesh, "lowrank", warm_up=None), "mesh of two dimensions"),
        (lambda: registered(mesh, "none", gather_codec="onebit"), "int8"),
        (lambda: registered(mesh, "int8", rules=[("9.*", "none")]), "no parameter"),
        (
            lambda: registered(mesh, "none", gather_codec=(None, "int8")[dist.get_rank() % 2]),
            "gather_codec=",
        ),
        (several_meshes, "different meshes"),
    ]
    if hasattr(_fsdp_common, "ShardPlacementResult"):  # not in torch 2.10
        calls.append((several_groups, "2 groups of parameters"))
    replicas = meshes()["replicas"]
    if dist.get_world_size() > 2:  # each shard's replicas agree
        choice = ("none", "onebit")[replicas.get_local_rank("shard")]
        calls.append((lambda: registered(replicas, choice), "feedback="))
    for call, text in calls:
        with pytest.raises(InvalidArgument, match=text):
            call()
    module, state = registered(mesh, "onebit")
    train(module, range(1))
    saved = state.state_dict()
    with pytest.raises(InvalidArgument, match="each rank loads its own"):
        state.load_state_dict({**saved, "rank": saved["rank"] ^ 1})
    with pytest.raises(InvalidArgument, match="FSDP shards"):
        state.load_state_dict({key: each for key, each in saved.items() if key != "parts"})
    others = {f"another.{key}": each for key, each in saved["feedback"].items()}
    with pytest.raises(InvalidArgument, match="the model no parameter"):
        state.load_state_dict({**saved, "feedback": others, "parts": 7}, resized=True)
    with pytest.raises(InvalidArgument, match="elements"):
        state.load_state_dict({**saved, "parts": 7}, resized=True)
    state.close()


@on_ranks
def test_a_biased_codec_before_an_adaptive_optimizer_is_warned_of() -> None:
    module, state = registered(own_mesh(), "onebit")
    logged = torch_ranks.logged()
    optimizer = torch.optim.AdamW(module.parameters())
    for step in range(2):
        backward(module, step)
        optimizer.step()
    state.close()
    assert len(logged) == (dist.get_rank() == 0)
    assert all("AdamW after the codec onebit" in each for each in logged)
