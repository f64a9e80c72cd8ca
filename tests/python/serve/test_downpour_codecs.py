"""What a biased push codec comes with: int8 for the first pushes, and for small parameters."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from gradwire import InvalidArgument, serve
from gradwire.torch import Compression, Downpour, Stages
from gradwire.torch._downpour_codecs import WARM_UP, PushCodecs

PARAMETERS = {
    "0.weight": torch.zeros(64, 40),
    "0.bias": torch.zeros(64),
    "norm[1].weight": torch.zeros(1, 4096),
    "2.weight": torch.zeros(5, 64),
    "3.weight": torch.zeros(32, 32),
    "4.weight": torch.zeros(2, 4096),
}
SMALL = [("0.bias", "int8"), ("norm[[]1].weight", "int8"), ("2.weight", "int8")]


def test_onebit_begins_in_int8_and_leaves_small_parameters_there() -> None:
    codecs = PushCodecs(Compression("onebit"), PARAMETERS)
    assert codecs.used == ["none", "onebit", "int8"]
    assert codecs.at(0) == codecs.at(WARM_UP - 1) == ("int8", SMALL)
    assert codecs.at(WARM_UP) == ("onebit", SMALL)


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
def test_other_codecs_stay_as_they_are(codec: str) -> None:
    codecs = PushCodecs(Compression(codec), PARAMETERS)
    assert codecs.used == list(dict.fromkeys(["none", codec]))
    assert codecs.at(0) == codecs.at(WARM_UP) == (codec, [])


def test_what_is_given_wins() -> None:
    codecs = PushCodecs(Compression("onebit", rules=[("*.bias", "none")], warm_up=3), PARAMETERS)
    assert codecs.at(2) == ("int8", [("*.bias", "none")])
    assert codecs.at(3) == ("onebit", [("*.bias", "none")])
    assert PushCodecs(Compression("onebit", warm_up=0), PARAMETERS).used == ["none", "onebit"]
    assert PushCodecs(Compression("onebit", warm_up=0), PARAMETERS).at(0) == ("onebit", [])


def test_a_model_of_small_parameters_is_compressed_all_the_same() -> None:
    codecs = PushCodecs(Compression("onebit"), {"w": torch.zeros(8, 8), "b": torch.zeros(8)})
    assert codecs.at(WARM_UP) == ("onebit", [])


@pytest.mark.parametrize(
    ("codec", "warm_up", "says"),
    [
        ("int8", 5, "leave warm_up= out"),
        ("onebit", -1, "warm_up"),
        ("onebit", 1.5, "warm_up"),
        ("two", None, "two"),
        (Stages((0, "onebit")), None, "a push takes names of codecs"),
    ],
)
def test_nonsense_is_refused(codec: Any, warm_up: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        PushCodecs(Compression(codec, warm_up=warm_up), PARAMETERS)


def test_residuals_that_decay_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="leave it out"):
        PushCodecs(Compression("onebit", decay=0.9), PARAMETERS)


def test_pushes_change_their_codec_when_the_warm_up_is_over(
    stack: ExitStack, server: serve.Server
) -> None:
    weight, bias = torch.zeros(64, 40, requires_grad=True), torch.zeros(64, requires_grad=True)
    optimizer = Downpour(
        [weight, bias],
        serve.SGD(lr=1.0),
        compression=Compression("onebit", warm_up=2),
        store=server.store,
        timeout=30,
    )
    stack.callback(optimizer.close)
    draw = torch.Generator().manual_seed(0)
    moves: list[list[int]] = []
    for _ in range(4):
        weight.grad, bias.grad = (
            torch.randn(each.shape, generator=draw) for each in (weight, bias)
        )
        before = [each.detach().clone() for each in (weight, bias)]
        optimizer.step()
        pairs = zip(before, (weight, bias), strict=True)
        moves.append([len((was - now.detach()).round(decimals=5).unique()) for was, now in pairs])
    blocks = -(-weight.numel() // 1024) + 1  # of onebit, and one that the shards' bound cuts
    assert all(of_weight > 4 * blocks for of_weight, _ in moves[:2])
    assert all(of_weight <= 2 * blocks for of_weight, _ in moves[2:])  # two means each
    assert all(of_bias > 40 for _, of_bias in moves)
