"""DistributedLion: votes of the ranks, and Lion where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire import Communicator
from gradwire.torch import DistributedLion
from local_training import bits, small, weights
from ranks import on_ranks, run
from replicated_training import Replica, own_gradients
from torch import nn


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, Algorithm 2, for the average that `vote` makes of each rank's signs."""

    def __init__(self, model: nn.Module, ranks: int, vote: Any) -> None:
        self.model, self.vote = model, vote
        self.momenta = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(ranks)]

    def step(self, gradients: list[list[torch.Tensor]], lr: float, decay: float) -> None:
        for i, each in enumerate(self.model.parameters()):
            signs = 0
            for its, momenta in zip(gradients, self.momenta, strict=True):
                signs = signs + (0.9 * momenta[i] + 0.1 * its[i]).sign()
                momenta[i].lerp_(its[i], 0.01)
            each.data -= lr * (self.vote(signs / len(gradients)) + decay * each.data)


@pytest.mark.parametrize(
    ("p", "vote", "codec"),
    [
        (1, "majority", "onebit"),
        (1, "mean", "onebit"),
        (2, "majority", "onebit"),
        (3, "majority", "onebit"),
        (5, "majority", "onebit:block=64"),
        (4, "majority", "none"),
        (3, "mean", "none"),
        (4, "mean", "bf16"),
    ],
)
def test_ranks_move_by_their_votes(p: int, vote: str, codec: str) -> None:
    def body(comm: Communicator) -> torch.Tensor:
        options = {"lr": 0.01, "weight_decay": 0.1, "min_elements": 0}
        replica = Replica(comm, DistributedLion, vote=vote, codec=codec, **options)
        replica.train(6)
        replica.optimizer.check_agreement()
        return weights(replica.model)

    model = small()
    lion = Lion(model, p, torch.sign if vote == "majority" else lambda mean: mean)
    for step in range(6):
        lion.step(own_gradients(model, step, p), 0.01, 0.1)
    for found in run(p, body):
        torch.testing.assert_close(found, weights(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("vote", "codec"), [("majority", "int8"), ("mean", "onebit")])
@on_ranks(3)
def test_all_ranks_have_the_same_bits_after_each_step(
    comm: Communicator, vote: str, codec: str
) -> None:
    replica = Replica(comm, DistributedLion, vote=vote, codec=codec, algorithm="auto")
    found = replica.train(5)
    (first, keeps), *others = comm.all_gather_object(
        (found, replica.optimizer.feedback is not None)
    )
    assert all(found == first for found, _ in others)
    assert keeps == (vote == "mean")


@on_ranks(2)
def test_a_parameter_without_a_gradient_has_no_vote(comm: Communicator) -> None:
    replica = Replica(comm, DistributedLion, lr=0.01)
    replica.optimizer.step()
    assert bits(replica.model) == bits(small())
