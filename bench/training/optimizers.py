"""Trains transformers and a CNN by AdamW, SGD and Lion, once per way to exchange and seed.

    python -m bench.training.optimizers            # all of it: hours on two cores
    python -m bench.training.optimizers --tasks lm --optimizers adamw --exchanges none int8
    python -m bench.training.optimizers --quick    # one seed, 40 steps: what is trained says little
    python -m bench.training.optimizers --links 100mbit,100us   # also milliseconds of a step there
    python -m bench.training.optimizers --links 100mbit,100us --timed-only  # these alone

Learning rates are the best of a few, by the first seed's loss with dense gradients. For one seed
all ways begin with the same parameters and see the same examples. Every finished training is a line
in the file of `--runs`: a program that was stopped goes on where it was, and another call with
other options adds to it. Results have the same bits however busy the machine is; milliseconds of a
step have not.

Writes bench/results/optimizers-DATE.md and .png, and optimizers-DATE-runs.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import gradwire

from bench.common import report
from bench.training import methods
from bench.training.trials import exchanges, launch, optimizers_report
from bench.training.trials.trial import Outcome, Trial, best_rate

_LOW_RANKS = tuple(f"lowrank:rank={rank}+small=int8+int8=0.1" for rank in (4, 8))
_CONTROLS = ("onebit", "threshold:density=0.01", "topk:density=0.01")  # before AdamW
_ONE_BIT = (
    "OneBitAdam",
    "OneBitAdam+int8=0.29",
    "OneBitAdam/every=3+int8=0.29",
    "OneBitAdam/codec=topk:density=0.005",
)
# Of every optimizer, in the order of tables.
EXCHANGES = {
    "adamw": (
        *("none", "gloo", "gloo:powersgd", "fp16", "bf16", "int8", "int4"),
        *_LOW_RANKS,
        *_ONE_BIT,
        *(f"{each}+int8=0.2" for each in _CONTROLS),
        *(exchanges.without_feedback(each) for each in (*_LOW_RANKS[:1], *_ONE_BIT)),
        exchanges.without_feedback("onebit+int8=0.2"),
    ),
    "lion": ("none", "int8"),
    "sgd": ("none", "int8", "int4", methods.ONEBIT, methods.LOW_RANK),
}
# Learning rates of which the best is taken; OneBitAdam has AdamW's.
RATES = {
    "adamw": (1e-3, 2e-3, 4e-3, 8e-3),
    "lion": (3e-4, 1e-3, 3e-3, 1e-2),
    "sgd": (0.03, 0.1, 0.3),
}
BATCHES = {"lm": 32, "vit": 128, "cnn": 128, "mlp": 128}
_TIMED_STEPS = 42  # whole periods of every=3, which end with an exchange


def main() -> int:
    """Makes what is missing, and writes the report."""
    options = parse_options()
    code = launch.make_all(sweep, plan, options)
    if code != 0:
        return code
    made = optimizers_report.read(options.runs)
    optimizers_report.write(made, options.runs, report.stem_of(options.output, "optimizers"))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launch.add_options(parser, "optimizers")
    parser.add_argument("--tasks", nargs="+", choices=BATCHES, default=["lm", "vit", "cnn"])
    parser.add_argument("--optimizers", nargs="+", choices=EXCHANGES, default=list(EXCHANGES))
    parser.add_argument("--exchanges", nargs="+", type=exchange, help="in place of all")
    parser.add_argument("--rate", type=float, help="for all, in place of the best of a few")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, help="examples a step, of all ranks")
    parser.add_argument("--links", nargs="+", default=[], metavar="RATE,LATENCY", help="emulated")
    parser.add_argument("--timed-only", action="store_true", help="no training but over --links")
    parser.add_argument("--quick", action="store_true", help="--seeds 1 --steps 40")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = options.seeds[:1], 40
    return options


def exchange(text: str) -> str:
    try:
        return exchanges.check(text)
    except gradwire.InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def sweep(options: argparse.Namespace) -> Iterator[Trial]:
    """Every rate of each optimizer, with the first seed and dense gradients."""
    if options.rate is not None or options.timed_only:
        return
    for task in options.tasks:
        for optimizer in options.optimizers:
            trial = _trial(options, task, optimizer, "none", options.seeds[0])
            yield from (trial._replace(rate=rate) for rate in RATES[optimizer])


def plan(options: argparse.Namespace, made: Sequence[Outcome]) -> Iterator[Trial]:
    """All ways for one seed, then for the next; at last those that are timed over links."""
    for seed in [] if options.timed_only else options.seeds:
        yield from _all(options, made, seed)
    for link in options.links:
        for trial in _all(options, made, options.seeds[0]):
            if trial.exchange not in methods.PEERS:  # gloo has no emulated links
                yield trial._replace(link=link, steps=_TIMED_STEPS, first=0.5)


def _all(options: argparse.Namespace, made: Sequence[Outcome], seed: int) -> Iterator[Trial]:
    for task in options.tasks:
        for optimizer in options.optimizers:
            swept = _trial(options, task, optimizer, "none", options.seeds[0])
            rate = options.rate or best_rate(made, swept)
            if options.timed_only:
                rate = rate or RATES[optimizer][0]
            assert rate is not None  # of the sweep
            for exchange in chosen(options, optimizer):
                yield _trial(options, task, optimizer, exchange, seed)._replace(rate=rate)


def chosen(options: argparse.Namespace, optimizer: str) -> list[str]:
    """The optimizer's exchanges, or those of them that the options name."""
    own = EXCHANGES[optimizer]
    if options.exchanges is None:
        return list(own)
    names = {exchanges.name_of(each) for each in own}
    return [each for each in options.exchanges if each in own or exchanges.name_of(each) in names]


def _trial(
    options: argparse.Namespace, task: str, optimizer: str, exchange: str, seed: int
) -> Trial:
    first = exchanges.warm_up(exchange)
    longer = {} if first is None else {"first": first}
    return Trial(
        task=task,
        optimizer=optimizer,
        exchange=exchange,
        rate=options.rate or 0.0,
        batch=options.batch or BATCHES[task],
        steps=options.steps,
        seed=seed,
        clip=None if optimizer == "sgd" else 1.0,
        ranks=options.ranks,
        data=launch.data_of(options),
        **longer,
    )


if __name__ == "__main__":
    sys.exit(main())
