"""How far codecs move AdamW's updates from dense ones, on the gradients of one training.

    python -m bench.training.trials.adam_updates int8 int8:block=32@0 zero=0.003937 keep=0.003937

A dense training of `codec_noise.py`, whose names for ways to average these are. Each way has
moments of its own, of the same gradients. Prints, after some steps, the norm of the difference of
updates over that of the dense one, and the parameter that has most of the difference's square.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice

import torch
from torch.nn.utils import clip_grad_norm_

from bench.training.trials import codec_noise

_STEPS = (1, 5, 20, 40)
_BETAS, _EPSILON = (0.9, 0.999), 1e-8


class Moments:
    """Adam's, of one way to average."""

    def __init__(self, way: str, seed: int, sizes: list[int]) -> None:
        self.way, self._average = way, codec_noise.averaging(way, seed, sizes)
        self._first = self._second = torch.zeros(sum(sizes))

    def update(self, every: list[torch.Tensor], step: int) -> torch.Tensor:
        """Adam's of a step from 1, of the ranks' gradients, clipped to a norm of 1."""
        averaged = self._average(every)
        averaged = averaged / averaged.norm().clamp(min=1.0)
        self._first = self._first.lerp(averaged, 1 - _BETAS[0])
        self._second = self._second.lerp(averaged.square(), 1 - _BETAS[1])
        first, second = (
            self._first / (1 - _BETAS[0] ** step),
            self._second / (1 - _BETAS[1] ** step),
        )
        return first / (second.sqrt() + _EPSILON)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="+")
    parser.add_argument("--task", choices=codec_noise.SETTINGS, default="vit")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of the learning rate's schedule")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trial = codec_noise.trial_of(options, options.seed)
    torch.manual_seed(trial.seed)
    task = codec_noise.task_of(trial.task)
    model = task.model()
    sizes = [each.numel() for each in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.rate)
    moments = [Moments(way, trial.seed, sizes) for way in ("none", *options.ways)]
    for step, some in enumerate(islice(codec_noise.batches(trial, task), max(_STEPS)), 1):
        every = [codec_noise.gradient(model, each) for each in some]
        dense, *others = [each.update(every, step) for each in moments]
        if step in _STEPS:
            for way, found in zip(options.ways, others, strict=True):
                print(f"step {step}, {way}: {_difference(model, dense, found)}", flush=True)
        codec_noise.use(model, sum(every[1:], every[0]) / len(every))
        clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = trial.rate * trial.rate_factor(step - 1)
        optimizer.step()
    return 0


def _difference(model: torch.nn.Module, dense: torch.Tensor, found: torch.Tensor) -> str:
    named = dict(model.named_parameters())
    squares = (found - dense).square().split([each.numel() for each in named.values()])
    shares = [float(each.sum()) for each in squares]
    name, most = max(zip(named, shares, strict=True), key=lambda each: each[1])
    off = (sum(shares) ** 0.5) / float(dense.norm())
    return f"{100 * off:.1f} % off, {100 * most / sum(shares):.0f} % of that in {name}"


if __name__ == "__main__":
    sys.exit(main())
