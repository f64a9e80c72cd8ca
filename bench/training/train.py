"""Trains a CNN on Fashion-MNIST once per codec, feedback on and off, batch size and seed.

    python -m bench.training.train --quick       # five minutes: one seed, one epoch, one batch size
    nohup nice python -m bench.training.train &  # all of it: about two hours on two idle cores
    python -m bench.training.train --resume      # goes on where that one stopped
    python -m bench.training.train --compose STEP_TIMES.json   # accuracy over seconds on slow links

Every finished run is a line in the file of `--runs`; the report in bench/results/ is made of all
its lines. For one seed and batch size, all methods start from the same parameters, see the same
images in the same order, and have the same learning rates. The results are the same bits however
fast the machine and the links are, so other work only makes this take longer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import gradwire
from gradwire._launch import launcher

from bench.common.report import ROOT, stem_of
from bench.training import images, methods, train_links, train_report
from bench.training.methods import Method
from bench.training.train_runs import WARM_UP, Run, read_results

RUNS = ROOT / "build" / "train-runs.jsonl"
METHODS = [
    *map(Method, methods.PEERS),
    *map(Method.parse, methods.TRAINED),
    *(Method.parse(each).control for each in methods.TRAINED if Method.parse(each).feeds_back),
    *(Method.parse(each)._replace(feedback=True) for each in ("fp16", "bf16", "int8", "int4")),
]
# The best of 0.02, 0.05, 0.1 and 0.2 for codec none, by training loss.
LEARNING_RATES = {16: 0.1, 64: 0.1}
EPOCHS = {16: 3, 64: 8}  # 2,811 and 1,872 steps: 3 of the larger batch are 702


def main() -> int:
    options = parse_options()
    if "RANK" in os.environ:
        from bench.training.train_ranks import serve

        return serve(options.store, read_plan(options.plan), options.data, options.runs)
    if options.compose is None and not options.report:
        code = run_all(options)
        if code != 0:
            return code
    results = read_results(options.runs)
    if options.compose is not None:
        train_links.write(results, options.compose, options.output)
    else:
        train_report.write(results, options.output)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--methods",
        nargs="+",
        type=method,
        default=METHODS,
        metavar="METHOD",
        help='codecs and gloo\'s, as in "onebit", "topk:density=0.001-feedback"',
    )
    what.add_argument("--only", nargs="+", metavar="NAME", help="of the methods, these codecs")
    what.add_argument("--batches", nargs="+", type=int, default=[16, 64], help="images per rank")
    what.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    what.add_argument("--epochs", type=float, help="for every batch size")
    what.add_argument("--learning-rate", type=float, help="for every batch size")
    what.add_argument(
        "--warm-up", type=float, default=WARM_UP, help="share of the steps before a biased codec"
    )
    what.add_argument("-n", "--ranks", type=int, default=4)
    what.add_argument("--algorithm", default="auto", help="of gradwire's all_reduce")
    what.add_argument("--data", type=Path, help="directory of other IDX files")
    what.add_argument("--quick", action="store_true", help="--batches 64 --seeds 1 --epochs 1")
    how = parser.add_argument_group("what to do with it")
    how.add_argument("--runs", type=Path, default=RUNS, help="file of finished runs")
    how.add_argument("--resume", action="store_true", help="add to that file what it lacks")
    how.add_argument("--report", action="store_true", help="only write the report")
    how.add_argument("--compose", type=Path, metavar="STEP_TIMES.json", help="only draw over time")
    how.add_argument(
        "--output",
        type=Path,
        help="of the report, without a suffix",
        default=stem_of(None, "train"),
    )
    how.add_argument("--plan", type=Path, help=argparse.SUPPRESS)  # set for the ranks
    how.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.batches, options.seeds, options.epochs = [64], [1], 1
    unknown = set(options.batches) - set(EPOCHS)
    if unknown and None in (options.learning_rate, options.epochs):
        parser.error(f"--batches {min(unknown)} needs --learning-rate and --epochs")
    return options


def method(text: str) -> Method:
    try:
        return Method.parse(text).check()
    except gradwire.InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_all(options: argparse.Namespace) -> int:
    """Trains what the file of runs lacks; returns an exit code."""
    done = {each.run for each in read_results(options.runs)} if options.runs.exists() else set()
    if done and not options.resume:
        print(f"{options.runs} has {len(done)} runs: --resume adds to them", file=sys.stderr)
        return 2
    try:
        data = images.load_fashion_mnist() if options.data is None else images.load(options.data)
    except (RuntimeError, OSError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    for each in options.methods:
        each.check()
    left = [run for run in plan(options, data.name) if run not in done]
    return launch(options, left) if left else 0


def plan(options: argparse.Namespace, data: str) -> list[Run]:
    """All methods for one seed, then for the next; and so for each batch size."""
    chosen = [
        each
        for each in options.methods
        if options.only is None or {str(each), each.codec, each.family} & set(options.only)
    ]
    return [
        Run(
            method=str(each),
            batch=batch,
            seed=seed,
            epochs=options.epochs or EPOCHS[batch],
            learning_rate=options.learning_rate or LEARNING_RATES[batch],
            warm_up=options.warm_up,
            ranks=options.ranks,
            algorithm=options.algorithm,
            data=data,
        )
        for batch in options.batches
        for seed in options.seeds
        for each in chosen
    ]


def launch(options: argparse.Namespace, runs: list[Run]) -> int:
    """Starts the ranks, which append to the file of runs."""
    options.runs.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        planned = Path(scratch) / "plan.json"
        planned.write_text(json.dumps([each._asdict() for each in runs]))
        own = ["-m", "bench.training.train", "--plan", str(planned), "--store", f"{scratch}/store"]
        own += ["--runs", str(options.runs)]
        own += [] if options.data is None else ["--data", str(options.data)]
        return launcher.run(["-n", str(options.ranks), *own])


def read_plan(path: Path) -> list[Run]:
    return [Run(**each) for each in json.loads(path.read_text())]


if __name__ == "__main__":
    sys.exit(main())
