"""FSDP2 in codecs: the same bits on all ranks, conservation, bytes, and training."""

from __future__ import annotations

from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, Stages, register_fsdp
from gradwire.torch.exchange import automatic
from gradwire.torch.fsdp.shards import sharded_modules
from sharded_training import (
    Books,
    agree,
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch_pool import Pool, on_ranks
from torch_versions import has_fsdp_hooks

pytestmark = has_fsdp_hooks
LOSSY = ("int8", "int4", "onebit", "threshold:density=0.05", "topk:density=0.05")


def alone(steps: range) -> list[torch.Tensor]:
    """The parameters after the same training on one rank, which sees all batches."""
    module = layers()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            x, y = batch(step, rank)
            (mse_loss(module(x), y) / dist.get_world_size()).backward()
        optimizer.step()
    return list(module.parameters())


@on_ranks
def test_without_codecs_it_is_torchs_training() -> None:
    for mesh in meshes().values():
        module, state = registered(mesh, "none")
        train(module, range(4))
        for ours, theirs in zip(module.parameters(), alone(range(4)), strict=True):
            assert torch.allclose(ours.full_tensor(), theirs, atol=1e-6)
        assert state.steps == 4
        assert state.feedback is None
        state.close()


@pytest.mark.parametrize(("link", "codec"), [(None, "none"), ("2mbit", "int8")])
@torch_ranks.on_ranks(4)
def test_auto_follows_the_links(link: str | None, codec: str) -> None:
    with pytest.MonkeyPatch.context() as environment:
        if link is not None:
            environment.setenv("GRADWIRE_LINK", link)
        found = []
        for mesh in meshes().values():
            module, state = registered(mesh, "auto")
            backward(module, 0)
            found.append((str(state.codec), state.why))
            state.close()
    assert [each for each, _ in found] == [codec] * 2, found
    assert all(f"codec='auto' chose {codec}" in why for _, why in found)


@torch_ranks.on_ranks(4)
def test_auto_chooses_again_on_all_ranks_when_steps_have_shown_their_time() -> None:
    """The rank that computes longest decides, whichever shard it has."""
    slow = gradwire.CostModel({"within.beta": 8e-5, "within.latency": 1e-5})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_LINK", "1gbit,10us")
        patch.setattr(automatic, "measured", lambda *_: slow)
        seconds = 1000.0 * (dist.get_rank() == 3)
        patch.setattr(automatic.Later, "computing", lambda *_: seconds)
        for mesh in meshes().values():
            module, state = registered(mesh, "auto")
            codecs = []
            for step in range(10):
                backward(module, step)
                codecs.append(str(state.codec))
            assert codecs == ["int8"] * 8 + ["none"] * 2
            assert "steps that compute 1e+06 ms" in state.why
            assert state.state_dict()["chosen"] == ("none", True)
            state.close()


@on_ranks
def test_auto_on_one_rank_alone_is_refused_on_all() -> None:
    for mesh in meshes().values():
        with pytest.raises(gradwire.InvalidArgument, match="a different codec="):
            registered(mesh, "int8" if dist.get_rank() else "auto")


@on_ranks
def test_biased_codecs_begin_after_a_warm_up_as_under_ddp() -> None:
    for mesh in meshes().values():
        module, state = registered(mesh, "onebit", warm_up=2)
        by_hand = Stages((0, "int8"), (2, "onebit"))
        other, its = registered(mesh, by_hand, rules=[("[!2].*", "int8"), ("*.bias", "int8")])
        found = []
        for step in range(4):
            for each in (module, other):
                backward(each, step)
            codecs = state.stats().codecs.items()
            found.append({name: each.parameters for name, each in codecs})
        assert found == [{"int8": 6}] * 2 + [{"int8": 5, "onebit": 1}] * 2
        for one, twin in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad.to_local(), twin.grad.to_local())
        assert state.why.startswith("onebit after 2 steps in int8")
        state.close()
        its.close()


@on_ranks
def test_nothing_is_lost_and_replicas_agree() -> None:
    for name, mesh in meshes().items():
        codecs = (*LOSSY, "lowrank:rank=2") if name == "replicas" else LOSSY
        for codec in codecs:
            module, state = registered(mesh, codec, feedback=True)
            books = Books(module)
            train(module, range(6))
            assert books.error(state) < 1e-5, (name, codec)
            assert state.stats().last.kept == 1
            assert state.feedback is not None
            kept = sum(state.feedback.keys().values())
            shards_of = [each for its in books.modules for each in its.shards]
            if name == "sharded":
                assert kept == dist.get_world_size() * sum(each.padded for each in shards_of)
            else:
                assert kept == sum(each.elements for each in shards_of)
                assert agree(shards(module), mesh["replicate"].get_group())
            state.close()


@on_ranks
def test_beside_tensor_parallelism() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    data = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("data", "tensor"))
    module = layers()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module, mesh["tensor"], plan)
    fully_shard(module, mesh=mesh["data"])
    state = register_fsdp(
        module, Compression("onebit", min_elements=0, warm_up=0), gather_codec="int8"
    )
    books = Books(module)
    for step in range(4):
        x, y = batch(step, mesh.get_local_rank("data"))
        mse_loss(module(x), y).backward()
    if data > 1:
        assert books.error(state) < 1e-5
    state.close()


class Recomputed(nn.Module):
    """Forgets its activations, and computes them again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(20, 50), nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._layers, x, use_reentrant=False)

    def _layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


@on_ranks
def test_recomputed_and_compiled_models() -> None:
    for mesh in meshes().values():
        for make in (Recomputed, layers):
            module = sharded(mesh, make)
            state = register_fsdp(
                module, Compression("onebit", min_elements=0, warm_up=0), gather_codec="int8"
            )
            books = Books(module)
            called = module if make is Recomputed else torch.compile(module, backend="aot_eager")
            for step in range(3):
                backward(called, step)
            assert state.steps == 3
            assert books.error(state) < 1e-5
            state.close()


class Nested(nn.Module):
    """Computes its first layer again in a backward of its own, within the whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 50), nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.first, x.requires_grad_(), use_reentrant=True))


def other_backwards() -> None:
    module = sharded(own_mesh(), Nested)
    register_fsdp(module, Compression("onebit", min_elements=0, warm_up=0))
    with pytest.raises(gradwire.InvalidArgument, match="use_reentrant=False"):
        backward(module, 0)
    module, _ = registered(own_mesh(), "onebit")
    module.set_requires_gradient_sync(False)
    backward(module, 0)
    module.set_requires_gradient_sync(True)
    with pytest.raises(gradwire.InvalidArgument, match="pipelining"):  # which does just this
        sharded_modules(module)[0].group.post_backward()


def test_steps_whose_end_is_not_known_are_refused(pool: Pool) -> None:
    pool.run(other_backwards)
    pool.close()  # a hook that raises ends the groups of its job


@on_ranks
def test_rules_stages_and_small_parameters() -> None:
    for mesh in meshes().values():
        rules = [("2.*", "none"), ("*.bias", "topk:density=0.2")]
        stages = Stages((0, "int8"), (2, "onebit"))
        module, state = registered(mesh, stages, rules=rules, min_elements=5)
        books = Books(module)
        train(module, range(5))
        assert books.error(state) < 1e-5
        found = state.stats().codecs
        assert {"none", "onebit", "topk"} == {each.partition(":")[0] for each in found}
        state.close()


def wide() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 512, bias=False), nn.Linear(512, 10, bias=False))


def sent(codec: str, gather_codec: str | None, mesh: Any) -> tuple[float, int]:
    """The ratio of bytes in reductions, and the bytes of a step's gathers and reductions."""
    module = sharded(mesh, wide)
    state = register_fsdp(module, Compression(codec, warm_up=0), gather_codec=gather_codec)
    backward(module, 0)
    before = state.communicator.traffic.bytes_sent
    backward(module, 1)
    total = state.communicator.traffic.bytes_sent - before
    ratio = state.stats().last.ratio
    state.close()
    return ratio, total


@on_ranks
def test_bytes_fall() -> None:
    found = meshes()
    dense = {name: sent("none", None, mesh) for name, mesh in found.items()}
    for name, mesh in found.items():
        assert dense[name][0] > 0.97
        assert sent("bf16", None, mesh)[0] > 1.9
        assert sent("int8", None, mesh)[0] > 3.6
        assert sent("onebit", None, mesh)[0] > 18
    if found["sharded"].get_group().size() == dist.get_world_size():
        both = sent("int8", "int8", found["sharded"])[1]
        gathered = sent("none", "int8", found["sharded"])[1]
        assert both < dense["sharded"][1] / 3.5
        assert gathered < dense["sharded"][1] / 1.6


@on_ranks
def test_training_reaches_the_loss_of_dense_gradients() -> None:
    for mesh in meshes().values():
        module, state = registered(mesh, "none")
        first = train(module, range(1), lr=0)
        dense = train(module, range(40), lr=0.05)
        assert dense < 0.5 * first
        state.close()
        bounds = ((Stages((0, "int8"), (25, "onebit")), 1.3), ("int8", 1.05))
        for codec, bound in bounds:  # onebit lags behind at first
            module, state = registered(mesh, codec, gather_codec="int8")
            loss = train(module, range(40), lr=0.05)
            assert loss < bound * dense, f"{codec}: {loss}, dense {dense}"
            state.close()


def gathered(module: Any) -> list[torch.Tensor]:
    """The parameters that this rank computes with."""
    for each in module.modules():
        if hasattr(each, "unshard"):
            each.unshard()
    found = [each.detach().clone() for each in module.parameters()]
    for each in module.modules():
        if hasattr(each, "reshard"):
            each.reshard()
    return found


def gathers_exactly() -> None:
    """After `close`, and after a registration without `gather_codec`."""
    for mesh in meshes().values():
        module, state = registered(mesh, "none", gather_codec="int8")
        masters = [each.full_tensor() for each in module.parameters()]
        state.close()
        assert all(map(torch.equal, gathered(module), masters))
        states = [register_fsdp(module, gather_codec=each) for each in ("int8", None)]
        assert all(map(torch.equal, gathered(module), masters))
        for each in states:
            each.close()


def test_without_its_codec_parameters_are_gathered_exactly(pool: Pool) -> None:
    pool.run(gathers_exactly)


@on_ranks
def test_gathered_parameters_agree_and_masters_stay() -> None:
    for name, mesh in meshes().items():
        for codec, step in (("bf16", 2**-8), ("fp16", 2**-10), ("int8", 1 / 127)):
            module, state = registered(mesh, "none", gather_codec=codec)
            masters = [each.full_tensor() for each in module.parameters()]
            found = gathered(module)
            gathering = dist.get_world_size() // (1 if name == "sharded" else 2)  # ranks of a model
            assert agree(found)
            for ours, master in zip(found, masters, strict=True):
                assert torch.equal(ours, master) == (gathering == 1)
                assert (ours - master).abs().max() <= step * master.abs().max()
            module(batch(0)[0]).sum().backward()
            after = [each.full_tensor() for each in module.parameters()]
            assert all(map(torch.equal, after, masters))  # the optimizer's are not rounded
            state.close()


@on_ranks
def test_mixed_precision() -> None:
    for mesh in meshes().values():
        for reduce_dtype in (torch.float32, torch.bfloat16, torch.float16):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
            losses = []
            for codec, gather_codec in (("none", None), ("onebit", "int8")):
                module = sharded(mesh, mp_policy=policy)
                state = register_fsdp(
                    module, Compression(codec, min_elements=0, warm_up=0), gather_codec=gather_codec
                )
                losses.append(train(module, range(8), lr=0.05))
                if codec == "onebit":
                    assert state.feedback is not None
                    assert state.feedback.keys()
                state.close()
            assert losses[1] < 1.15 * losses[0], reduce_dtype


@torch_ranks.on_ranks(4)
def test_groups_of_another_backend() -> None:
    found = []
    for mesh in meshes().values():
        module, state = registered(mesh, "onebit", gather_codec="int8")
        books = Books(module)
        train(module, range(4))
        found.append(books.error(state))
        state.close()
    gathers_exactly()
    assert max(found) < 1e-5


def in_backward() -> tuple[str, int]:
    mesh = meshes()["sharded"]
    module = sharded(mesh, reshard_after_forward=False)
    state = register_fsdp(module, "int8")
    backward(module, 0)
    loss = module(batch(1)[0]).sum()
    dist.barrier()
    if dist.get_rank() == 1:
        torch_ranks.die()
    with pytest.raises(gradwire.TransportError) as raised:
        loss.backward()
    assert state.error is not None
    with pytest.raises(RuntimeError):  # gloo's own error where FSDP gathers over that
        backward(module, 2)
    return str(state.error), raised.value.peer


@pytest.mark.parametrize("backend", ["gradwire", "gloo"])
def test_a_killed_rank_is_named(backend: str) -> None:
    text, peer = torch_ranks.run(2, in_backward, dying=(1,), backend=backend)[0]
    assert peer == 1
    assert "rank 1" in text


@on_ranks
def test_lossless_trains_with_the_bits_of_none() -> None:
    for mesh in meshes().values():
        for policy in (None, MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)):
            options = {} if policy is None else {"mp_policy": policy}
            found = []
            for codec, gather_codec in (("none", None), ("lossless", "lossless")):
                module = sharded(mesh, **options)
                state = register_fsdp(
                    module, Compression(codec, min_elements=0), gather_codec=gather_codec
                )
                assert state.feedback is None
                train(module, range(4), lr=0.05)
                found.append([each.full_tensor() for each in module.parameters()])
                state.close()
            assert all(map(torch.equal, *found))


def sent_plain_and_packed() -> list[int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [sent(each, None, mesh)[1] for each in ("none", "lossless")]


def test_lossless_sends_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_TRANSPORT", "tcp")
    for plain, packed in torch_ranks.run(2, sent_plain_and_packed):
        assert packed < 0.95 * plain
