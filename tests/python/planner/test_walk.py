"""Layers of torch modules, walked on the meta device."""

from __future__ import annotations

import pytest
import torch
from gradwire import InvalidArgument
from gradwire.lab.planner.tables.catalogue import network
from gradwire.lab.planner.walk import walk
from torch import nn

HERE = __name__


def alexnet() -> nn.Module:
    sizes = ((3, 96, 11), (96, 256, 5), (256, 384, 3), (384, 384, 3), (384, 256, 3))
    layers: list[nn.Module] = []
    for index, (channels, filters, size) in enumerate(sizes):
        layers.append(nn.Conv2d(channels, filters, size, 4 if index == 0 else 1, size // 2))
        if index in (0, 1, 4):
            layers.append(nn.MaxPool2d(3, 2))
    layers[0] = nn.Conv2d(3, 96, 11, 4, 2)
    linear = [nn.Linear(9216, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.Flatten(), *linear)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 16)
        self.untied = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 1000, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens) + self.untied(tokens))


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


def attention() -> nn.Module:
    return nn.TransformerEncoder(transformer(), 2)


MADE = nn.Linear(4, 4)


def leave() -> None:
    raise SystemExit(3)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_module_has_the_layers_of_its_table() -> None:
    walked, table = walk(f"{HERE}:alexnet", "3,224,224"), network("alexnet")
    kept = ("kind", "weights", "parameters", "inputs", "outputs", "flops", "matrices")
    for one, other in zip(walked.layers, table.layers, strict=True):
        assert [getattr(one, each) for each in kept] == [getattr(other, each) for each in kept]


def test_shared_weights_count_once_and_are_tied() -> None:
    found = {each.name: each for each in walk(f"{HERE}:Tied", "20:int64").layers}
    assert [found[each].parameters for each in ("table", "untied", "head")] == [16000, 800, 0]
    assert [found[each].tied for each in ("table", "untied", "head")] == [True, False, True]
    assert found["table"].rows == 20
    assert found["head"].flops == 2 * 20 * 16 * 1000


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))


def test_a_layer_that_runs_twice_computes_twice() -> None:
    (layer,) = walk(f"{HERE}:Twice", "8").layers
    assert (layer.parameters, layer.inputs, layer.flops) == (72, 16, 2 * 2 * 64)


def test_parameters_of_attention_are_found() -> None:
    found = walk(f"{HERE}:attention", "10,64")
    assert found.parameters == sum(each.numel() for each in attention().parameters())


@pytest.mark.parametrize(
    ("path", "sample", "says"),
    [
        ("no_such_module_here:net", "3", "cannot be walked.*No module named"),
        (f"{HERE}:nothing", "3", "cannot be walked.*nothing"),
        (f"{HERE}:HERE", "3", "is a str, and not callable"),
        (f"{HERE}:network", "3", "cannot be walked"),
        (f"{HERE}:alexnet", None, "give its shape"),
        (f"{HERE}:alexnet", "3,0", "no shape"),
        (f"{HERE}:alexnet", "3,x", "no shape"),
        (f"{HERE}:alexnet", "3,4:floaty", "no shape"),
        (f"{HERE}:alexnet", "5,224,224", "cannot be walked.*RuntimeError"),
        (f"{HERE}:Branches", "4", "cannot be walked"),
        ("torch.nn:Identity", "4", "no parameters"),
        ("torch:arange", "4", "cannot be walked"),
        (f"{HERE}:MADE", "4", "is a module already"),
        (f"{HERE}:leave", "4", "cannot be walked.*SystemExit"),
    ],
)
def test_what_cannot_be_walked_says_why(path: str, sample: str | None, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        walk(path, sample)


class Pair(nn.Module):
    """A forward of two inputs of different types."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 16)
        self.mix = nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.mix(self.table(tokens) * mask.unsqueeze(-1))


def test_a_forward_may_have_several_inputs() -> None:
    found = walk(f"{HERE}:Pair", ["128:int64", "128"])
    assert found.parameters == 16 * 1000 + 16 * 17
    assert found.sample == "tensors of 128:int64 and 128"
    assert found.layers[0].rows == 128
    with pytest.raises(InvalidArgument, match=r"128:int64: TypeError.*mask"):
        walk(f"{HERE}:Pair", "128:int64")
    with pytest.raises(InvalidArgument, match="give its shape"):
        walk(f"{HERE}:Pair", [])
