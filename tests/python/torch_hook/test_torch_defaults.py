"""What `register` adds to a biased codec of which only the name is given."""

from __future__ import annotations

import logging
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, Stages, State, register
from gradwire.torch.exchange.defaults import Model, Settings, sensitive, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import backward, same_everywhere
from trainer_options import grouped

BIASED = ["onebit", "threshold", "topk", gradwire.codec.LowRank(rank=2)]


class Transformer(nn.Module):
    """Positions come before the first layer, and the output layer before the others."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(1, 12, 32))
        self.words = nn.Embedding(200, 32)
        self.out = nn.Linear(32, 200, bias=False)
        if tied:
            self.out.weight = self.words.weight
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(32, 32)


def left_out(module: nn.Module, least: int = 1) -> set[str]:
    return set(sensitive(Model(module, dict(module.named_parameters())), least))


def matrices(module: nn.Module) -> set[str]:
    return {name for name, each in module.named_parameters() if sum(n > 1 for n in each.shape) > 1}


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_ends_are_found(tied: bool) -> None:
    module = Transformer(tied=tied)
    inner = matrices(module) - left_out(module)
    kinds = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight")
    expected = {f"layers.layers.{i}.{each}" for i in (0, 1) for each in (*kinds, "linear2.weight")}
    assert inner == expected


def test_the_ends_of_other_networks_are_found() -> None:
    cnn = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Linear(8, 8), nn.Linear(8, 4)
    )
    assert matrices(cnn) - left_out(cnn) == {"2.weight", "3.weight"}
    assert matrices(cnn) - left_out(cnn, least=65) == {"2.weight"}
    assert left_out(nn.Linear(3, 3)) == {"weight", "bias"}
    cnn[0].requires_grad_(False)  # what does not travel is no end
    assert matrices(cnn) - left_out(cnn) == {"3.weight"}
    heads = nn.Sequential(nn.Embedding(64, 16), *(nn.Linear(16, 64) for _ in range(4)))
    assert matrices(heads) - left_out(heads) == {"1.weight", "2.weight", "3.weight"}


def test_parameters_with_names_of_their_own_are_of_the_whole_model() -> None:
    module = nn.Sequential(*(nn.Linear(9, 9, bias=False) for _ in range(3)))
    renamed = {f"weights/{i}.matrix": each for i, each in enumerate(module.parameters())}
    assert set(sensitive(Model(module, renamed), 0)) == set(renamed)


@pytest.mark.parametrize("codec", BIASED)
def test_a_biased_codec_begins_in_int8_and_is_for_the_middle(codec: Any) -> None:
    module = nn.ModuleDict({"a[0]": nn.Linear(9, 9), "b": nn.Linear(9, 9), "c": nn.Linear(9, 9)})
    model = Model(module, dict(module.named_parameters()))
    chosen = settings(model, Compression(codec, min_elements=0))
    stages = chosen.compression.codec
    assert isinstance(stages, Stages)
    assert [stages(step) for step in (0, 499, 500)] == ["int8", "int8", codec]
    vectors = {"b.bias", "c.bias"}
    assert {each for each, _ in chosen.compression.rules} == {
        "a[[]0].weight",
        "a[[]0].bias",
        *vectors,
    } | {"c.weight"}
    assert f"{codec} after 500 steps in int8 (warm_up=500), for 30% of" in chosen.why
    sooner = settings(model, Compression(codec, min_elements=0, warm_up=7)).compression.codec
    assert sooner(7) == codec  # type: ignore[operator]
    given = [("*", "none")]
    assert settings(model, Compression(codec, rules=given)).compression.rules == given


@pytest.mark.parametrize(
    "codec", ["none", "int8", Stages((0, "onebit")), lambda _: "onebit", gradwire.codec.FP16()]
)
def test_what_is_chosen_step_by_step_or_unbiased_is_left_alone(codec: Any) -> None:
    model = Model(nn.Linear(3, 3), {})
    for given in (Compression(codec), Compression("onebit", warm_up=0)):
        assert settings(model, given) == Settings(given)


@pytest.mark.parametrize("warm_up", [-1, 1.5, "many", True])
def test_a_warm_up_that_is_no_number_of_steps_is_refused(warm_up: Any) -> None:
    for codec in ("onebit", "none"):
        with pytest.raises(gradwire.InvalidArgument, match="warm_up="):
            Compression(codec, warm_up=warm_up)


def test_a_warm_up_beside_stages_is_refused() -> None:
    with pytest.raises(gradwire.InvalidArgument, match="leave warm_up= out"):
        Compression(Stages((0, "onebit")), warm_up=5)


class Bytes(gradwire.codec.Codec):
    """A codec written in Python."""

    def encode(self, x: Any) -> bytes:
        return bytes(x.tobytes())

    def decode(self, payload: memoryview, count: int) -> Any:
        return np.frombuffer(payload, np.float32, count)


def test_a_warm_up_before_a_codec_written_in_python_is_refused() -> None:
    with pytest.raises(gradwire.InvalidArgument, match=r"give codec=Stages\(\(0, 'int8'\), \(5, "):
        Compression(Bytes(), warm_up=5)


def test_a_warm_up_before_a_codec_that_needs_none_is_refused() -> None:
    with pytest.raises(gradwire.InvalidArgument, match="warm_up=5 is for a biased codec"):
        Compression("int8", warm_up=5)


def deep() -> nn.Module:
    torch.manual_seed(3)
    middle = [each for _ in range(3) for each in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), *middle, nn.Linear(64, 10))


@torch_ranks.on_ranks(2)
def test_training_changes_to_the_codec_after_the_warm_up() -> None:
    ddp, by_hand = DistributedDataParallel(deep()), DistributedDataParallel(deep())
    state = register(ddp, Compression("topk:density=0.05", warm_up=1))
    names = [name for name, _ in ddp.module.named_parameters()]
    rules = [(each, "int8") for each in names if each not in ("2.weight", "4.weight", "6.weight")]
    register(by_hand, Compression(Stages((0, "int8"), (1, "topk:density=0.05")), rules=rules))
    found = []
    for step in range(2):
        for each in (ddp, by_hand):
            backward(each, step)
        found.append({name: each.parameters for name, each in state.stats().codecs.items()})
    pairs = zip(ddp.parameters(), by_hand.parameters(), strict=True)
    same = all(one.grad.equal(other.grad) for one, other in pairs)
    assert found == [{"int8": 10}, {"int8": 7, "topk:density=0.05": 3}]
    assert same_everywhere(each.grad for each in ddp.parameters())
    assert same
    assert str(state.stats()).startswith("topk:density=0.05 after 1 steps in int8")


def told(optimizer: torch.optim.Optimizer, ddp: DistributedDataParallel, **hook: Any) -> list[str]:
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda each: records.append(each.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    state: State = register(ddp, **grouped(optimizer=optimizer, **hook))
    logging.getLogger("gradwire").removeHandler(handler)
    state.close()
    return records


@torch_ranks.on_ranks(2)
def test_an_optimizers_momentum_is_left_to_the_program_which_is_told() -> None:
    """What register() says of an optimizer's momentum, which it leaves as it is."""
    found = []
    for hook, options in (
        ({"codec": "onebit"}, {"momentum": 0.9, "nesterov": True}),
        ({"codec": "onebit"}, {}),
        ({"codec": "onebit", "momentum": 0.9}, {}),
        ({"codec": "onebit", "warm_up": 0}, {"momentum": 0.9}),
        ({"codec": "lowrank"}, {"momentum": 0.9}),
        ({"codec": "int8"}, {"momentum": 0.9}),
    ):
        ddp = DistributedDataParallel(deep())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, **options)
        found.append(told(optimizer, ddp, **hook))
        assert optimizer.param_groups[0]["momentum"] == options.get("momentum", 0)
    first, second = torch_ranks.gathered(found)
    (message,), *others = first
    assert "register(momentum=0.9, nesterov=True)" in message
    assert not any(others)
    assert not any(second)


@torch_ranks.on_ranks(2)
def test_a_codec_that_is_left_for_no_parameter_is_told() -> None:
    """What register() says of a codec that it leaves for none of the parameters."""
    ends = nn.Sequential(nn.Linear(20, 64), nn.Linear(64, 10))
    found = []
    for module, hook in ((ends, {}), (ends, {"warm_up": 0}), (deep(), {})):
        ddp = DistributedDataParallel(module)
        found.append(told(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, codec="onebit", **hook))
    first, second = torch_ranks.gathered(found)
    (message,), *others = first
    assert "stay in int8 and codec='onebit' changes nothing" in message
    assert not any(others)
    assert not any(second)


@torch_ranks.on_ranks(2)
def test_another_warm_up_on_one_rank_is_refused_on_all() -> None:
    with pytest.raises(gradwire.InvalidArgument) as raised:
        register(
            DistributedDataParallel(nn.Linear(3, 3)), Compression("onebit", warm_up=dist.get_rank())
        )
    assert "a different warm_up= by rank: 0 on rank 0; 1 on rank 1" in str(raised.value)
