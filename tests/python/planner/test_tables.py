"""Tables of networks, against the counts that were published of them."""

from __future__ import annotations

import pytest
from gradwire import InvalidArgument
from gradwire.lab.planner.tables.catalogue import TABLES, network

# Of the papers' authors or of the usual implementations, which agree to the parameter.
PARAMETERS = {
    "alexnet": 62_378_344,
    "bert_base": 109_482_240,
    "bert_large": 335_141_888,
    "googlenet": 13_378_280,
    "gpt2": 124_439_808,
    "gpt2_large": 774_030_080,
    "gpt2_medium": 354_823_168,
    "gpt2_xl": 1_557_611_200,
    "nin": 7_595_176,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
}
# FireCaffe's table 1 for batches of 1,024: MB of |W| and of |D|.
FIRECAFFE = {
    "nin": (30, 5800),
    "alexnet": (249, 1680),
    "googlenet": (54, 19100),
    "vgg19": (575, 42700),
}
# Forward multiply-adds of one sample, in 10^9, as their papers or model pages round them.
MULTIPLY_ADDS = {"resnet18": 1.8, "resnet50": 4.1, "resnet152": 11.5, "vgg16": 15.5, "vgg19": 19.6}


@pytest.mark.parametrize("name", TABLES)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert network(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", FIRECAFFE)
def test_volumes_are_those_of_firecaffe(name: str) -> None:
    weights, activations = FIRECAFFE[name]
    found = network(name)
    assert 4 * found.parameters / 1e6 == pytest.approx(weights, rel=0.02)
    assert 4 * found.inputs * 1024 / 1e6 == pytest.approx(activations, rel=0.02)


@pytest.mark.parametrize("name", MULTIPLY_ADDS)
def test_operations_are_the_published_ones(name: str) -> None:
    assert network(name).flops / 2e9 == pytest.approx(MULTIPLY_ADDS[name], rel=0.02)


def test_names_may_have_hyphens_and_capitals() -> None:
    assert network("GPT2-medium") == network("gpt2_medium")


def test_an_unknown_model_is_refused_with_the_list() -> None:
    with pytest.raises(InvalidArgument, match=r"no model 'resnet51': give one of alexnet, .*vgg19"):
        network("resnet51")
