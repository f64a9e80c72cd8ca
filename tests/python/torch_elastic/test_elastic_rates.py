"""Learning rates that follow the number of ranks, through torch's schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradwire.torch.elastic.rates import Rates
from torch.optim import lr_scheduler as of_torch
from torch.optim.swa_utils import SWALR


def _sequence(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = of_torch.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    rest = of_torch.LambdaLR(optimizer, lambda step: 0.9**step)
    return of_torch.SequentialLR(optimizer, [warm_up, rest], [4])


def _chain(optimizer: torch.optim.Optimizer) -> Any:
    first = of_torch.ConstantLR(optimizer, 0.5, 5)
    return of_torch.ChainedScheduler([first, of_torch.ExponentialLR(optimizer, 0.9)])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: of_torch.StepLR(optimizer, 3, 0.5),
    "function": lambda optimizer: of_torch.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "cosine": lambda optimizer: of_torch.CosineAnnealingLR(optimizer, 20, eta_min=0.01),
    "warm restarts": lambda optimizer: of_torch.CosineAnnealingWarmRestarts(optimizer, 5, 1, 0.01),
    "averaged weights": lambda optimizer: SWALR(optimizer, 0.02, anneal_epochs=8),
    "one cycle": lambda optimizer: of_torch.OneCycleLR(optimizer, [0.8, 0.2], total_steps=20),
    "cycles": lambda optimizer: of_torch.CyclicLR(optimizer, 0.1, 0.8, 3, cycle_momentum=False),
    "sequence": _sequence,
    "chain": _chain,
}


def rates(made: Callable[[Any], Any], at: int | None) -> list[tuple[float, ...]]:
    """The rates of two groups in 12 steps; from step `at` on there are three ranks, not two."""
    groups = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": [each], "lr": lr} for each, lr in zip(groups, (0.4, 0.1), strict=True)],
        momentum=0.9,
    )
    scheduler = made(optimizer)
    following = Rates(optimizer, [scheduler])
    following.follow(2)
    found = []
    for step in range(12):
        if step == at:
            following.follow(5)  # and another change before the next step
            following.undo()
            following.follow(3)
            last = [float(each["lr"]) for each in optimizer.param_groups]
            assert scheduler.get_last_lr() == pytest.approx(last)
        found.append(tuple(float(each["lr"]) for each in optimizer.param_groups))
        optimizer.step()
        following.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR of torch 2.8
@pytest.mark.parametrize("name", SCHEDULERS)
def test_all_later_rates_are_scaled(name: str) -> None:
    plain, scaled = (rates(SCHEDULERS[name], at) for at in (None, 2))
    assert scaled[:2] == plain[:2]
    for own, expected in zip(scaled[2:], plain[2:], strict=True):
        assert own == pytest.approx([1.5 * each for each in expected])


def test_the_least_rate_of_a_plateau_is_scaled() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.8)
    scheduler = of_torch.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.4)
    following = Rates(optimizer, [scheduler])
    following.follow(1)
    following.follow(2)
    for _ in range(5):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.8)
