"""OneBitAdam with an exchange at every so many steps: three ways, with all ranks in one process.

    python -m bench.training.trials.skipped_rounds --warm-up 87 --every 3 --between coast

Between exchanges each rank moves by its own gradients, and the sum of its moves is exchanged, as in
0/1 Adam (`local`; Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via
0/1 Adam", Algorithm 1); or all ranks move along the common momentum, and an exchange puts in place
of these moves the average of those that they would have made by their own gradients (`coast`); or
they move so, and gradients wait to be added to the momentum (`add`); or none moves, and an exchange
is followed by a step of the sum of the rates (`wait`).

Everything else is as in `virtual_ranks`, whose other options hold. Prints the final loss.
"""

from __future__ import annotations

import argparse
import sys

import torch

from bench.training.trials import virtual_ranks
from bench.training.trials.tasks import Batch
from bench.training.trials.trial import Trial
from bench.training.trials.virtual_ranks import BETA1, DECAY, RANKS, Study


def main() -> int:
    options = parse_options()
    torch.set_num_threads(1)
    print(f"{STUDIES[options.between](virtual_ranks.trial_of(options), options).run():.4f}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = virtual_ranks.add_options(__doc__)
    parser.add_argument("--every", type=int, default=3, help="steps an exchange")
    parser.add_argument("--between", choices=STUDIES, default="coast")
    return parser.parse_args()


class Adding(Study):
    """All ranks move by the common momentum, and gradients wait to be added to it."""

    def __init__(self, trial: Trial, options: argparse.Namespace) -> None:
        super().__init__(trial, options)
        self._waiting = [torch.zeros_like(self.values) for _ in range(RANKS)]

    def _is_due(self, step: int) -> bool:
        return (step - self.trial.first_steps) % self.options.every == 0

    def _move(self, every: list[torch.Tensor], rate: float, step: int) -> None:
        for waiting, each in zip(self._waiting, every, strict=True):
            waiting.add_(each)
        if self._is_due(step):
            super()._move(self._waiting, rate, step)
            self._waiting = [torch.zeros_like(each) for each in self._waiting]
            return
        self._first *= BETA1
        self.values.mul_(1 - rate * DECAY)
        self.values.add_(self._first, alpha=-rate / (1 - BETA1**step))


class Waiting(Adding):
    """Nothing moves between exchanges: a batch that is as many times larger."""

    def __init__(self, trial: Trial, options: argparse.Namespace) -> None:
        super().__init__(trial, options)
        self._rates = 0.0

    def _move(self, every: list[torch.Tensor], rate: float, step: int) -> None:
        self._rates += rate
        for waiting, each in zip(self._waiting, every, strict=True):
            waiting.add_(each, alpha=1 / self.options.every)
        if self._is_due(step):
            Study._move(self, self._waiting, self._rates, step)
            self._waiting = [torch.zeros_like(each) for each in self._waiting]
            self._rates = 0.0


class Coasting(Adding):
    """All ranks move by the common momentum; an exchange replaces that by the ranks' own moves."""

    def __init__(self, trial: Trial, options: argparse.Namespace) -> None:
        super().__init__(trial, options)
        self._length = 0.0  # of the moves since the last exchange
        self._coasted = torch.zeros_like(self.values)

    def _move(self, every: list[torch.Tensor], rate: float, step: int) -> None:
        length = rate / (1 - BETA1**step)
        self._length += length
        for own, moved, each in zip(self._own, self._waiting, every, strict=True):
            own.lerp_(each, 1 - BETA1)
            moved.add_(own, alpha=length)
        self.values.mul_(1 - rate * DECAY)
        if self._is_due(step):
            self._meet()
        else:
            self._first = self._first * BETA1
            self._coasted.add_(self._first, alpha=length)
            self.values.add_(self._first, alpha=-length)

    def _meet(self) -> None:
        average = self._exchange(self._waiting)
        self.values.add_(self._coasted).sub_(average)
        self._first = average / self._length
        self._own = [self._first.clone() for _ in range(RANKS)]
        self._waiting = [torch.zeros_like(average) for _ in range(RANKS)]
        self._length, self._coasted = 0.0, torch.zeros_like(average)


class Local(Adding):
    """Each rank moves by its own gradients; the ranks' sums of moves are exchanged."""

    def __init__(self, trial: Trial, options: argparse.Namespace) -> None:
        super().__init__(trial, options)
        self._apart: list[torch.Tensor] = []  # the ranks' values, once they differ
        self._length, self._left = 0.0, 1.0  # of the moves so far; what decay has left

    def _gradient_of(self, rank: int, batch: Batch) -> torch.Tensor:
        if self._apart:
            self.values.copy_(self._apart[rank])
        return super()._gradient_of(rank, batch)

    def _move(self, every: list[torch.Tensor], rate: float, step: int) -> None:
        if not self._apart:
            self._apart = [self.values.clone() for _ in range(RANKS)]
            self._common = self.values.clone()
        length, left = rate / (1 - BETA1**step), 1 - rate * DECAY
        self._length, self._left = self._length + length, self._left * left
        for own, moved, values, each in zip(
            self._own, self._waiting, self._apart, every, strict=True
        ):
            own.lerp_(each, 1 - BETA1)
            moved.add_(own, alpha=length)
            values.mul_(left).add_(own, alpha=-length)
        if self._is_due(step) or step == self.trial.steps:
            self._meet()

    def _meet(self) -> None:
        average = self._exchange(self._waiting)
        self._common.mul_(self._left).sub_(average)
        self._own = [average / self._length for _ in range(RANKS)]
        self._waiting = [torch.zeros_like(average) for _ in range(RANKS)]
        self._apart = [self._common.clone() for _ in range(RANKS)]
        self._length, self._left = 0.0, 1.0
        self.values.copy_(self._common)


STUDIES: dict[str, type[Adding]] = {
    "local": Local,
    "coast": Coasting,
    "add": Adding,
    "wait": Waiting,
}


if __name__ == "__main__":
    sys.exit(main())
