"""How far batches may grow, and whether growth, compression or local steps saves the most bytes.

    python -m bench.training.large_batch           # hours on two cores
    python -m bench.training.large_batch --quick   # one seed, one epoch, few batches

Four ranks train a CNN on Fashion-MNIST for the same number of epochs with global batches of 64 to
8,192 images. SGD follows FireCaffe's recipe (Iandola 2016; Goyal 2017, sec. 2): the learning rate
grows with the batch, linearly or as its square root, rises in a warm-up, and falls as the square
root of what is left of the training; momentum and weight decay stay as they are. LARS (You 2017)
and LAMB (You 2020) scale each layer's update. Rates are the best of a few for each batch, by the
first seed's accuracy.
Beside it, with a batch of 64: codecs, and DiLoCo's local steps; and some of these together.

Every finished training is a line in the file of `--runs`, and is not made again. Results have the
same bits however busy the machine is.

Writes bench/results/large-batch-DATE.md and .png, and large-batch-DATE-runs.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.common import report
from bench.training import methods
from bench.training.trials import large_batch_report, launch
from bench.training.trials.large_batch_report import SMALLEST
from bench.training.trials.tasks import TASKS
from bench.training.trials.trial import Outcome, Trial, best_rate, read

BATCHES = tuple(SMALLEST << power for power in range(8))  # to 8,192
WEIGHT_DECAY = 5e-4  # of SGD, LARS and LAMB


class Rule(NamedTuple):
    """Learning rates to try with a batch k times the smallest: base · k^power · factor, each."""

    base: float
    powers: tuple[float, ...]
    factors: tuple[float, ...]

    def rates(self, batch: int) -> list[float]:
        """For a batch, with three digits."""
        scales = [self.base * (batch / SMALLEST) ** power for power in self.powers]
        rates = [float(f"{scale * factor:.3g}") for scale in scales for factor in self.factors]
        return list(dict.fromkeys(rates))


RULES = {
    # Not a power of 1, linear scaling: of 512 images on, SGD then stays at 10 % on this network.
    "sgd": Rule(0.1, (0, 0.5), (0.5, 1)),
    "lars": Rule(0.4, (0.5,), (0.25, 0.5, 1)),
    "lamb": Rule(8e-3, (0.5,), (0.25, 0.5, 1)),
}
# Beside growing batches, by SGD: exchanges with the smallest batch, and with larger ones.
SAVINGS = (
    *((SMALLEST, each) for each in ("int8", methods.ONEBIT, methods.TOPK, methods.LOW_RANK)),
    *((SMALLEST, f"DiLoCo/{every}") for every in (4, 16, 64)),
    *((batch, each) for batch in (512, 2048) for each in ("int8", methods.LOW_RANK)),
    (512, methods.ONEBIT),
    (512, "DiLoCo/4"),
)


def main() -> int:
    """Makes what is missing, and writes the report."""
    options = parse_options()
    code = launch.make_all(sweep, plan, options)
    if code != 0:
        return code
    stem = report.stem_of(options.output, "large-batch")
    large_batch_report.write(read(options.runs), options.runs, stem, options.target)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launch.add_options(parser, "large-batch")
    parser.add_argument("--task", choices=TASKS, default="cnn")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="of all ranks")
    parser.add_argument("--optimizers", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--epochs", type=float, default=8)
    parser.add_argument("--target", type=float, default=0.9, help="accuracy whose cost is told")
    parser.add_argument("--savings", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch, three batches")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = options.seeds[:1], 1
        options.batches = options.batches[:1] + options.batches[3::3]
    return options


def sweep(options: argparse.Namespace) -> Iterator[Trial]:
    """Every batch with every rate of each optimizer, with the first seed."""
    count = _count(options)
    for optimizer in options.optimizers:
        for batch in options.batches:
            trial = _trial(options, count, optimizer, batch, options.seeds[0])
            for rate in RULES[optimizer].rates(batch):
                yield trial._replace(rate=rate)


def plan(options: argparse.Namespace, made: Sequence[Outcome]) -> Iterator[Trial]:
    """The best rates with every seed, and what else may save bytes."""
    count = _count(options)
    for seed in options.seeds:
        for optimizer in options.optimizers:
            for batch in options.batches:
                trial = _trial(options, count, optimizer, batch, seed)
                yield trial._replace(rate=_best(options, made, trial))
        for batch, exchange in SAVINGS if options.savings else ():
            if batch in options.batches and "sgd" in options.optimizers:
                trial = _trial(options, count, "sgd", batch, seed)
                yield trial._replace(exchange=exchange, rate=_best(options, made, trial))


def _best(options: argparse.Namespace, made: Sequence[Outcome], trial: Trial) -> float:
    rate = best_rate(made, trial._replace(seed=options.seeds[0]), lambda each: -each.accuracy)
    assert rate is not None  # of the sweep
    return rate


def _count(options: argparse.Namespace) -> int:
    """Images to train with."""
    return TASKS[options.task](options.data).count


def _trial(options: argparse.Namespace, count: int, optimizer: str, batch: int, seed: int) -> Trial:
    return Trial(
        task=options.task,
        optimizer=optimizer,
        exchange="none",
        rate=0.0,
        batch=batch,
        steps=max(2, int(options.epochs * count) // batch),
        seed=seed,
        schedule="poly",
        ranks=options.ranks,
        points=30,
        weight_decay=WEIGHT_DECAY,
        epochs=options.epochs,
        data=launch.data_of(options),
    )


if __name__ == "__main__":
    sys.exit(main())
