"""Samples of an elastic training: none is lost, and none is taken twice."""

from __future__ import annotations

import random

import gradwire
import pytest
import torch
from gradwire.torch.elastic import Sampler


def taken_while_ranks_change(sampler: Sampler, seed: int) -> list[int]:
    """The samples of all steps; in some of them a rank is lost, and they are made again."""
    chance, found = random.Random(seed), []
    while samples := sampler.samples(ranks := chance.randint(1, 5), 4):
        parts = [sampler.parts(samples, rank, ranks) for rank in range(ranks)]
        for own in parts:
            assert all(0 < len(each.indices) <= sampler.batch for each in own)
            total = sum(len(each.indices) for each in own)
            assert sum(each.weight for each in own) == pytest.approx(total * ranks / samples)
        if chance.random() < 0.3:
            continue
        found += [i for own in parts for each in own for i in each.indices.tolist()]
        sampler.position += samples
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_sample_is_lost_or_taken_twice(seed: int) -> None:
    sampler = Sampler(97, 5, epochs=3, seed=seed)
    found = taken_while_ranks_change(sampler, seed)
    assert 3 * 97 - len(found) < 5  # fewer than there are ranks
    for epoch in range(2):
        assert sorted(found[97 * epoch : 97 * (epoch + 1)]) == list(range(97))
    assert found[:97] != found[97 : 2 * 97]  # shuffled anew


def test_all_ranks_have_one_order_whatever_their_random_state() -> None:
    torch.manual_seed(1)
    one = Sampler(50, 50, seed=3).parts(50, 0, 1)[0].indices
    torch.manual_seed(2)
    assert torch.equal(one, Sampler(50, 50, seed=3).parts(50, 0, 1)[0].indices)
    assert not torch.equal(one, Sampler(50, 50, seed=4).parts(50, 0, 1)[0].indices)


def test_a_rank_takes_batches_of_equal_size() -> None:
    sizes = [[len(each.indices) for each in Sampler(17, 8).parts(17, r, 2)] for r in (0, 1)]
    assert sizes == [[8], [5, 4]]


def test_a_dataset_is_collated() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0)[:, None], torch.arange(6))
    sampler = Sampler(data, 3, shuffle=False)
    x, y = sampler.collated(sampler.parts(3, 0, 1)[0].indices)
    assert x.tolist() == [[0], [1], [2]]
    assert y.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "given", [(0, 1), (5, 0), (5, 1.5), (-1, 2)], ids=lambda each: f"{each[0]}-{each[1]}"
)
def test_wrong_numbers_are_refused(given: tuple[int, int]) -> None:
    with pytest.raises(gradwire.InvalidArgument):
        Sampler(*given)
