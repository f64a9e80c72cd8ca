"""Bytes of layers under data and model parallelism, and the advice."""

from __future__ import annotations

import pytest
from gradwire.lab.planner.tables.catalogue import network
from gradwire.lab.planner.tables.network import Network
from gradwire.lab.planner.tables.transformers import embedding
from gradwire.lab.planner.volumes import total, volumes


def test_a_ring_sends_twice_all_but_a_share() -> None:
    """Baidu's count (Gibiansky 2017): 2 X (N - 1) / N for X bytes on N ranks."""
    (layer,) = [each for each in volumes(network("vgg16"), 8, 32) if each.layer.name == "fc7"]
    nbytes = 4 * (4096 * 4096 + 4096)
    assert layer.sent["data"] == pytest.approx(2 * nbytes * 7 / 8)


def test_alexnet_goes_both_ways() -> None:
    """The figures of docs/hybrid.md: 37.7 M weights, and 3.4 M inputs and outputs of 256 images."""
    found = {each.layer.name: each for each in volumes(network("alexnet"), 8, 32)}
    assert found["fc6"].layer.weights == 37_748_736
    assert found["fc6"].activations == 9216 * 32
    assert found["fc6"].sent["model"] == pytest.approx(2 * 7 / 8 * 4 * (9216 + 4096) * 256)
    assert [name for name, each in found.items() if each.advice == "model"] == ["fc6", "fc7", "fc8"]
    assert {each.advice for name, each in found.items() if name.startswith("conv")} == {"data"}


def test_advice_sends_the_least() -> None:
    found = volumes(network("alexnet"), 8, 32)
    assert total(found) < min(total(found, "data"), total(found, "model"))


def test_a_layer_that_cannot_be_divided_stays_whole() -> None:
    (layer,) = [each for each in volumes(network("alexnet"), 7, 32) if each.layer.name == "fc6"]
    assert layer.advice == "data"


def test_tables_of_which_few_rows_are_read_are_sparse() -> None:
    few = embedding("few", 1_000_000, 64, 20)
    all_ = embedding("all", 1024, 64, 1024)
    tied = embedding("tied", 1_000_000, 64, 20, tied=True)
    found = volumes(Network("tables", "20 rows", (few, all_, tied)), 4, 32)
    assert [each.advice for each in found] == ["sparse", "data", "data"]
    assert found[0].sent["sparse"] == 3 * 20 * 32 * (64 * 4 + 8)


@pytest.mark.parametrize(("batch", "read"), [(1, 20), (49, 980), (50, 1000), (51, 1000)])
def test_a_rank_gathers_no_row_twice(batch: int, read: int) -> None:
    """It gathers the rows that each other rank has read, at most all of them."""
    table = Network("table", "20 rows", (embedding("words", 1000, 64, 20),))
    (found,) = volumes(table, 4, batch)
    assert found.sent["sparse"] == 3 * read * (64 * 4 + 8)


def test_one_rank_sends_nothing() -> None:
    assert total(volumes(network("nin"), 1, 32)) == 0
