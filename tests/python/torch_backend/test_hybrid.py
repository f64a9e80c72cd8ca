"""Convolutions data-parallel and linear layers split, against the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradwire
import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch_pool import Pool, on_ranks
from torch_versions import has_fsdp_hooks

STEPS, BATCH, CLASSES = 3, 4, 8
PLAN = {"classifier.1": "model", "classifier.4": "model", "classifier.6": "model"}
CLOSE = 2e-6  # of float32 weights of about 0.1, which are sums in another order


class Net(nn.Module):
    """Convolutions and three linear layers, in torchvision's form."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(4),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.0),
            nn.Linear(256, width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.0),
            nn.Linear(width, width),
            nn.ReLU(inplace=True),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


def net(seed: int = 3, width: int = 64) -> Net:
    torch.manual_seed(seed)
    return Net(width)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(BATCH, 3, 16, 16, generator=source)
    return images, torch.randint(CLASSES, (BATCH,), generator=source)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, steps: int = STEPS) -> None:
    optimizer = sgd(model)
    for step in range(steps):
        images, labels = batch(step, dist.get_rank())
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


def trained_alone() -> nn.Module:
    """The same training in one process, which sees all ranks' batches at once."""
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        every = [batch(step, rank) for rank in range(dist.get_world_size())]
        images, labels = (torch.cat(each) for each in zip(*every, strict=True))
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def whole(parameter: Any) -> torch.Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def assert_as_alone(model: nn.Module) -> None:
    module = getattr(model, "module", model)
    for (name, ours), theirs in zip(
        module.named_parameters(), trained_alone().parameters(), strict=True
    ):
        worst = (whole(ours) - theirs).abs().max().item()
        assert worst < CLOSE, (name, worst)


@pytest.mark.parametrize("data", ["ddp", "fsdp"])
@on_ranks
def test_a_plan_trains_as_one_process(data: str) -> None:
    # Another seed on each rank: all begin with rank 0's weights.
    model = gradwire.torch.parallelize(net(3 + dist.get_rank()), PLAN, data=data)
    train(model)
    assert_as_alone(model)


@on_ranks
def test_gradients_accumulate_as_averages() -> None:
    """Gradients of two steps, of a model of which a part is sharded before and another frozen."""
    from torch.distributed.fsdp import fully_shard

    model, alone = net(), net()
    fully_shard(model.features)
    sharded = gradwire.torch.parallelize(model, PLAN, data="fsdp", reshard_after_forward=False)
    for each in (sharded, alone):
        each.classifier[4].bias.requires_grad_(False)
    size = dist.get_world_size()
    for step in range(2):
        images, labels = batch(step, dist.get_rank())
        cross_entropy(sharded(images), labels).backward()
        for rank in range(size):
            images, labels = batch(step, rank)
            (cross_entropy(alone(images), labels) / size).backward()
    for ours, theirs in zip(sharded.parameters(), alone.parameters(), strict=True):
        if theirs.requires_grad:
            assert torch.allclose(whole(ours.grad), theirs.grad, atol=CLOSE)


class InPlace(nn.Module):
    """Changes the outputs of its layers in place, without a module that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x += 1
        return self.last(relu(x, inplace=True))


@on_ranks
def test_frozen_layers_begin_alike_and_can_be_thawed() -> None:
    """A frozen layer begins as rank 0's too, and a split one that is thawed has averages."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for split in ("first", "last"):
        torch.manual_seed(rank)
        model = InPlace().requires_grad_(False)
        trained = gradwire.torch.parallelize(model, {split: "model"})
        assert trained is model  # nothing is data-parallel
        torch.manual_seed(0)
        rank_0s = InPlace()
        for ours, theirs in zip(model.parameters(), rank_0s.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs)
        model.get_submodule(split).requires_grad_(True)
        batches = torch.ones(size, 2, 8).cumsum(0)
        trained(batches[rank]).square().mean().backward()
        rank_0s(batches.flatten(0, 1)).square().mean().backward()
        layers = model.get_submodule(split), rank_0s.get_submodule(split)
        for ours, theirs in zip(*(each.parameters() for each in layers), strict=True):
            assert torch.allclose(whole(ours.grad), theirs.grad, rtol=1e-4)


@on_ranks
def test_neighbours_in_a_sequence_keep_activations_split() -> None:
    from torch.distributed.tensor import Shard

    linear = gradwire.torch.parallelize(net(), PLAN).module.classifier
    split = [linear[place].weight.placements[0] for place in (1, 4, 6)]
    assert split == [Shard(0), Shard(1), Shard(0)]  # a pair, and one alone
    apart = {"classifier.1": "model", "classifier.6": "model"}
    linear = gradwire.torch.parallelize(net(), apart).module.classifier
    assert [linear[place].weight.placements[0] for place in (1, 6)] == [Shard(0), Shard(0)]
    assert type(linear[4].weight) is nn.Parameter


def sent_by(model: nn.Module, other: Callable[[], int] = lambda: 0) -> float:
    """Bytes of this rank in one training step, the second: the first also makes agreements."""
    train(model, 1)
    dist.barrier()
    before = gradwire.torch.traffic().bytes_sent + other()
    train(model, 1)
    return gradwire.torch.traffic().bytes_sent + other() - before


@on_ranks
def test_bytes_are_those_of_the_formula() -> None:
    size, width = dist.get_world_size(), 512
    factor = 2 * (size - 1) / size * 4
    weights = sum(each.numel() for each in net(width=width).parameters())
    features = sum(each.numel() for each in net(width=width).features.parameters())
    cuts = 256 + width + width + CLASSES  # where a pair and a single layer begin and end
    formula = factor * (features + size * BATCH * cuts)
    dense = sent_by(gradwire.torch.parallelize(net(width=width), {}))
    assert dense == pytest.approx(factor * weights, rel=0.02)
    for data in ("ddp", "fsdp"):
        hybrid = sent_by(gradwire.torch.parallelize(net(width=width), PLAN, data=data))
        assert hybrid == pytest.approx(formula, rel=0.05)
        assert hybrid < dense / 10


@on_ranks
def test_the_hook_compresses_what_is_data_parallel() -> None:
    model = gradwire.torch.parallelize(net(), PLAN)
    state = gradwire.torch.register(model, "int8")
    train(model)
    alone = dict(trained_alone().named_parameters())
    for name, parameter in model.module.named_parameters():
        assert torch.allclose(whole(parameter), alone[name], atol=0.01), name
    assert state.stats().codecs["int8"].parameters == 4  # weights and biases of convolutions
    state.close()


@has_fsdp_hooks
@on_ranks
def test_fsdps_hooks_compress_what_is_data_parallel() -> None:
    model = gradwire.torch.parallelize(net(), PLAN, data="fsdp")
    state = gradwire.torch.register_fsdp(model, "int8")
    train(model)
    for ours, theirs in zip(model.parameters(), trained_alone().parameters(), strict=True):
        assert torch.allclose(whole(ours), theirs, atol=0.01)
    assert state.stats().codecs["int8"].parameters == 4
    state.close()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    model[1].weight = model[0].weight
    return model


def twice() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer)


def reparametrized() -> nn.Module:
    layer = nn.Linear(8, 8)
    weight = layer.weight
    del layer.weight
    layer.weight = weight * 1  # as torch.nn.utils.weight_norm does
    return layer


def frozen() -> nn.Module:
    return nn.Linear(8, 8).requires_grad_(False)


def compiled() -> Any:
    return torch.compile(net(), backend="eager")


def compiled_in_part() -> nn.Module:
    model = net()
    model.features.compile(backend="eager")
    return model


BAD: list[tuple[Callable[[], nn.Module], Any, str]] = [
    (net, {"classifier.9": "model"}, "no module of the model: .* classifier.1, classifier.4"),
    (net, {"classifier.1": "tensor"}, "'tensor': give 'data' or 'model'"),
    (net, ["classifier.1"], "plan=.* a dict of layers' names"),
    (net, {"features.0": "model"}, "'features.0', a Conv2d, and only nn.Linear"),
    (net, {"classifier": "model"}, "name linear layers in it: classifier.1, classifier.4"),
    (lambda: nn.Linear(8, 6 * 4 + 1), {"": "model"}, "out_features=25 cannot be divided by"),
    (Attention, {"heads.out_proj": "model"}, "NonDynamicallyQuantizableLinear"),
    (tied, {"1": "model"}, "0.weight and 1.weight are one parameter"),
    (twice, {"0": "model"}, "0.weight and 2.weight are one parameter"),
    (compiled, PLAN, "the model is compiled: compile what parallelize"),
    (compiled_in_part, PLAN, "'features', a part of the model, is compiled"),
    (lambda: nn.parallel.DistributedDataParallel(net()), PLAN, "give its .module"),
    (lambda: gradwire.torch.parallelize(net(), PLAN).module, PLAN, "split or reparametrized"),
    (lambda: torch.zeros(1), PLAN, "model=.* a torch.nn.Module"),
]


@on_ranks
def test_plans_that_cannot_be_applied_are_refused_on_all_ranks() -> None:
    for make, plan, message in BAD:
        with pytest.raises(gradwire.InvalidArgument, match=message):
            gradwire.torch.parallelize(make(), plan)
    for given, message in (({"data": "zero"}, "'ddp' or 'fsdp'"), ({"mesh": 4}, "one dimension")):
        with pytest.raises(gradwire.InvalidArgument, match=message):
            gradwire.torch.parallelize(net(), PLAN, **given)
    with pytest.raises(gradwire.InvalidArgument, match="'ddp' on rank 0 and 'fsdp' on rank 1"):
        gradwire.torch.parallelize(net(), PLAN, data=("ddp", "fsdp")[dist.get_rank() % 2])
    plan = PLAN if dist.get_rank() else {"classifier.1": "model"}
    with pytest.raises(gradwire.InvalidArgument, match="on rank 0 and "):
        gradwire.torch.parallelize(net(), plan)
    with pytest.raises(gradwire.InvalidArgument, match=r"failed on rank 1|'x'"):
        gradwire.torch.parallelize(net(), {"x": "model"} if dist.get_rank() == 1 else PLAN)


def uneven() -> None:
    model = gradwire.torch.parallelize(net(), PLAN)
    images = torch.randn(3 + dist.get_rank(), 3, 16, 16)
    with pytest.raises(gradwire.InvalidArgument, match="ranks disagree"):
        model(images)


def test_ranks_with_batches_of_other_sizes_are_told(pool: Pool) -> None:
    pool.run(uneven)
    pool.close()  # the group has failed


def test_a_proposal_splits_large_linear_layers() -> None:
    plan = gradwire.torch.hybrid_plan(net(width=512), 4, min_elements=1 << 17)
    assert plan == {
        "features.0": "data",
        "features.3": "data",
        "classifier.1": "model",
        "classifier.4": "model",
        "classifier.6": "data",
    }
    # 510 outputs cannot be divided by 4, those of the last layer can.
    plan = gradwire.torch.hybrid_plan(net(width=510), 4, min_elements=0)
    assert [name for name, kind in plan.items() if kind == "model"] == ["classifier.6"]
    for make in (tied, twice, reparametrized, frozen):  # these, parallelize() would refuse
        plan = gradwire.torch.hybrid_plan(make(), 2, min_elements=0)
        assert set(plan.values()) == {"data"}, make
    with pytest.raises(gradwire.InvalidArgument, match="the model is compiled"):
        gradwire.torch.hybrid_plan(compiled(), 2)
    with pytest.raises(gradwire.InvalidArgument, match="size=0"):
        gradwire.torch.hybrid_plan(net(), 0)


@on_ranks
def test_traffic_is_counted_by_group() -> None:
    group = dist.new_group()
    before = gradwire.torch.traffic(group)
    assert before.bytes_sent == 0
    dist.all_reduce(torch.ones(100_000), group=group)
    after = gradwire.torch.traffic(group)
    assert after.bytes_sent >= 400_000
    assert gradwire.torch.traffic() == gradwire.torch.traffic(dist.group.WORLD)
    with pytest.raises(gradwire.InvalidArgument, match="backend is gloo"):
        gradwire.torch.traffic(dist.new_group(backend="gloo"))
    others = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(gradwire.InvalidArgument, match="that this rank is in"):
            gradwire.torch.traffic(others)


def test_without_a_group_it_says_what_to_call() -> None:
    for call in (gradwire.torch.traffic, lambda: gradwire.torch.parallelize(net(), PLAN)):
        with pytest.raises(gradwire.InvalidArgument, match="init_process_group"):
            call()


@on_ranks
def test_checkpoints_fit_other_plans(tmp_path: Path) -> None:
    folder = str(tmp_path)
    import torch.distributed.checkpoint as dcp

    trained = gradwire.torch.parallelize(net(), PLAN)
    train(trained, 1)
    dcp.save(trained.module.state_dict(), checkpoint_id=folder)
    for model in (gradwire.torch.parallelize(net(4), PLAN, data="fsdp"), net(5)):
        dcp.load(state := model.state_dict(), checkpoint_id=folder)
        model.load_state_dict(state)
        for ours, theirs in zip(model.parameters(), trained.parameters(), strict=True):
            assert torch.equal(whole(ours), whole(theirs))


@on_ranks
def test_fused_optimizers_take_two_groups() -> None:
    model = gradwire.torch.parallelize(net(), PLAN)
    split = [each for each in model.parameters() if hasattr(each, "full_tensor")]
    others = [each for each in model.parameters() if not hasattr(each, "full_tensor")]
    optimizer = torch.optim.Adam([{"params": split}, {"params": others}], lr=0.01, foreach=True)
    images, labels = batch(0, dist.get_rank())
    first = cross_entropy(model(images), labels)
    for _ in range(5):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    assert loss < first


@pytest.mark.nightly
@on_ranks
def test_compiled() -> None:
    model = torch.compile(gradwire.torch.parallelize(net(), PLAN), backend="aot_eager")
    train(model)
    assert_as_alone(model._orig_mod)
