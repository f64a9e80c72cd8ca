"""Where OneBitAdam loses accuracy: its parts, each changed alone, with all ranks in one process.

    python -m bench.training.trials.virtual_ranks                 # as OneBitAdam is
    python -m bench.training.trials.virtual_ranks --codec none    # the second moment is frozen
    python -m bench.training.trials.virtual_ranks --sends gradient
    python -m bench.training.trials.virtual_ranks --second-moment exact

The language model of `optimizers.py`, and its settings, on 4 ranks. The warm-up is dense. Codecs
work as in the algorithm "direct": one error on each rank's way, and one on the way back. Prints
the final loss on unseen text. Bits depend on the processor, not on other work of the machine.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

from bench.training import images
from bench.training.trials.tasks import TASKS, Batch, Task
from bench.training.trials.trial import Trial

RANKS, BETA1, _BETA2, _EPS, DECAY, _CLIP, _FLOOR = 4, 0.9, 0.999, 1e-8, 0.01, 1.0, 0.1
_BLOCK = _SMALL = 1024  # elements of a block, and the least that are compressed


def main() -> int:
    options = parse_options()
    torch.set_num_threads(1)
    print(f"{Study(trial_of(options), options).run():.4f}")
    return 0


def trial_of(options: argparse.Namespace) -> Trial:
    """What is trained."""
    first = options.warm_up / options.steps
    return Trial("lm", "adamw", "", 0.004, 32, options.steps, options.seed, first=first)


def parse_options() -> argparse.Namespace:
    return add_options(__doc__).parse_args()


def add_options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sends", choices=["momentum", "gradient", "local"], default="momentum")
    parser.add_argument("--codec", choices=["onebit", "none"], default="onebit")
    parser.add_argument("--second-moment", choices=["frozen", "exact"], default="frozen")
    parser.add_argument("--limit", type=float, default=(1 - _BETA2) ** -0.5, help="of an element")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    return parser


class Study:
    """A training; state is in flat tensors, with the elements that are compressed first."""

    def __init__(self, trial: Trial, options: argparse.Namespace) -> None:
        torch.manual_seed(trial.seed)
        self.trial, self.options, self.task = trial, options, TASKS["lm"](None)
        self.model = self.task.model()
        large = [each for each in self.model.parameters() if each.numel() >= _SMALL]
        parts = large + [each for each in self.model.parameters() if each.numel() < _SMALL]
        self._compressed = sum(each.numel() for each in large)
        sizes = [each.numel() for each in parts]
        self._sizes = torch.tensor(sizes)
        self._part = torch.repeat_interleave(torch.arange(len(parts)), self._sizes)
        self.values = torch.cat([each.detach().reshape(-1) for each in parts])
        self._gradient = torch.zeros_like(self.values)
        for kind, flat in (("data", self.values), ("grad", self._gradient)):
            for each, its in zip(parts, flat.split(sizes), strict=True):
                setattr(each, kind, its.view(each.shape))
        self._first, self._second = torch.zeros_like(self.values), torch.zeros_like(self.values)
        self._root: torch.Tensor | None = None  # once the second moment is frozen
        self._residuals = [torch.zeros(self._compressed) for _ in range(RANKS + 1)]
        self._own = [self._first] * RANKS  # the ranks' momenta, where these stay apart

    def run(self) -> float:
        """Trains, and returns the loss on unseen text."""
        for step, some in enumerate(_batches(self.trial, self.task)):
            every = [self._gradient_of(rank, each) for rank, each in enumerate(some)]
            rate = self.trial.rate * self.trial.rate_factor(step)
            if step < self.trial.first_steps:
                self._step_dense(every, rate, step + 1)
            else:
                self._step_compressed(every, rate, step + 1)
        return _loss(self.model, self.task)

    def _gradient_of(self, rank: int, batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        self._gradient.zero_()
        cross_entropy(self.model(inputs), labels.flatten()).backward()
        return self._gradient.clone()

    def _step_dense(self, every: list[torch.Tensor], rate: float, step: int) -> None:
        """AdamW's."""
        average = self._follow(every)
        self._first.lerp_(average, 1 - BETA1)
        root = (self._second / (1 - _BETA2**step)).sqrt() + _EPS
        length = rate / (1 - BETA1**step)
        self.values.mul_(1 - rate * DECAY).addcdiv_(self._first, root, value=-length)

    def _step_compressed(self, every: list[torch.Tensor], rate: float, step: int) -> None:
        if self._root is None:
            self._precondition(self._new_root(step - 1))
            self._own = [self._first.clone() for _ in every]
        if self.options.second_moment == "exact":
            self._follow(every)
            self._precondition(self._new_root(step))
        self._move([self._preconditioned(each) for each in every], rate, step)

    def _preconditioned(self, gradient: torch.Tensor) -> torch.Tensor:
        """A rank's gradient, limited and divided by the frozen root."""
        assert self._root is not None
        scale = min(1, _CLIP * math.sqrt(RANKS) / float(gradient.norm()))
        return (gradient / self._root * scale).clamp_(-self.options.limit, self.options.limit)

    def _move(self, every: list[torch.Tensor], rate: float, step: int) -> None:
        """Makes a step of the ranks' preconditioned gradients."""
        average = self._exchange([self._to_send(rank, each) for rank, each in enumerate(every)])
        apart = self.options.sends == "gradient"
        self._first = self._first.lerp_(average, 1 - BETA1) if apart else average
        self.values.mul_(1 - rate * DECAY)
        self.values.add_(self._first, alpha=-rate / (1 - BETA1**step))

    def _follow(self, every: list[torch.Tensor]) -> torch.Tensor:
        """Adds the averaged gradient, clipped, to the second moment."""
        average = sum(every[1:], every[0]) / len(every)
        average = average * min(1, _CLIP / float(average.norm()))
        self._second.mul_(_BETA2).addcmul_(average, average, value=1 - _BETA2)
        return average

    def _new_root(self, step: int) -> torch.Tensor:
        root = (self._second / (1 - _BETA2**step)).sqrt()
        squares = torch.zeros(len(self._sizes)).index_add_(0, self._part, root * root)
        return torch.maximum(root, _FLOOR * (squares / self._sizes).sqrt()[self._part]) + _EPS

    def _precondition(self, root: torch.Tensor) -> None:
        """Divides momenta and residuals by a root, in place of the former one."""
        factor = 1 / root if self._root is None else self._root / root
        self._root, self._first = root, self._first * factor
        self._own = [each * factor for each in self._own]
        self._residuals = [each * factor[: self._compressed] for each in self._residuals]

    def _to_send(self, rank: int, own: torch.Tensor) -> torch.Tensor:
        if self.options.sends == "gradient":
            return own
        if self.options.sends == "momentum":
            return own.lerp(self._first, BETA1)
        self._own[rank].mul_(BETA1).add_(own, alpha=1 - BETA1)
        return self._own[rank]

    def _exchange(self, sent: list[torch.Tensor]) -> torch.Tensor:
        """The average, as it is delivered."""
        average = sum(sent[1:], sent[0]) / len(sent)
        if self.options.codec == "none":
            return average
        end = self._compressed
        ways = [self._delivered(rank, each[:end]) for rank, each in enumerate(sent)]
        total = sum(ways[1:], ways[0]) / len(ways)
        return torch.cat([self._delivered(RANKS, total), average[end:]])

    def _delivered(self, key: int, values: torch.Tensor) -> torch.Tensor:
        wanted = values + self._residuals[key]
        found = one_bit(wanted)
        self._residuals[key] = wanted - found
        return found


def one_bit(values: torch.Tensor) -> torch.Tensor:
    """What the codec onebit makes of values: in each block two means."""
    blocks = values.view(-1, _BLOCK)
    high = blocks >= 0
    count = high.sum(1, keepdim=True)
    above = (blocks * high).sum(1, keepdim=True) / count.clamp(min=1)
    below = (blocks * ~high).sum(1, keepdim=True) / (_BLOCK - count).clamp(min=1)
    return torch.where(high, above, below).view(-1)


def _batches(trial: Trial, task: Task) -> Iterator[list[Batch]]:
    """Of all ranks, by step."""
    size = trial.batch // RANKS
    orders = [
        images.batches(task.count, size, rank, RANKS, trial.seed, trial.steps)
        for rank in range(RANKS)
    ]
    for indices in zip(*orders, strict=True):
        yield [task.examples(each) for each in indices]


@torch.inference_mode()
def _loss(model: torch.nn.Module, task: Task) -> float:
    total = 0.0
    inputs, labels = task.unseen
    for some, wanted in zip(inputs.split(128), labels.split(128), strict=True):
        total += float(cross_entropy(model(some), wanted.flatten(), reduction="sum"))
    return total / labels.numel()


if __name__ == "__main__":
    sys.exit(main())
