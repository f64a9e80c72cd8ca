"""Trains a small CNN on local ranks: torch's own gloo DDP first, then gradwire's hook per codec.

Then the same over an emulated slow link, in fewer steps, with gradwire alone: what travels over
gloo is not held back. Every row starts from the same parameters and sees the same images in the
same order. Exits with 1 if the replicas of some row differ. `make demo` runs it; see --help for
what can be changed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

try:
    import sklearn  # noqa: F401  bundles the digits
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from tqdm import tqdm
except ImportError as missing:
    sys.exit(f"the demo needs {missing.name}: pip install '.[demo]', or run `make demo`")

import gradwire
from gradwire._launch import launcher

from bench.training import images, methods, replicas
from bench.training.methods import Method
from bench.training.train_runs import WARM_UP

CODECS = [Method.parse(each) for each in ("none", "fp16", methods.ONEBIT, methods.THRESHOLD)]
LINK_CODECS = [Method.parse(each) for each in ("none", "fp16", methods.ONEBIT, methods.LOW_RANK)]
LINK, NO_LINK = "100mbit,100us", "none"
CHECKS = 10  # of the test accuracy, in a training over the link
MEGABYTE = 1e6
WIDTH = 18  # of a title


class Row(NamedTuple):
    """What one training run measured; the same on every rank, but for the rank's own time."""

    method: str
    seconds: list[float]  # of each step
    megabytes: float | None  # sent per rank and step, mean over ranks; None: not to be known
    accuracy: float
    identical: bool
    curve: list[tuple[float, float]]  # seconds from the start, and test accuracy then


def main() -> int:
    options = parse_options()
    if "RANK" in os.environ:
        return rank_main(options)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    code = launch(options, [])
    if code == 0 and options.link != NO_LINK:
        code = launch(options, ["--link", options.link])
    return code


def launch(options: argparse.Namespace, launcher_options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        program = ["-m", "bench.training.demo", *sys.argv[1:], "--store", f"{scratch}/store"]
        return launcher.run(["-n", str(options.ranks), *launcher_options, *program])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--codecs", nargs="+", type=codec, default=CODECS, metavar="CODEC")
    parser.add_argument("--algorithm", default="auto", help="of gradwire's all_reduce")
    parser.add_argument("--data", type=Path, help="directory of MNIST's or Fashion-MNIST's files")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--epochs", type=float, help="instead of --steps")
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--link",
        default=LINK,
        metavar="RATE[,LATENCY]",
        help=f"of the second training; {NO_LINK}: without it",
    )
    parser.add_argument("--link-steps", type=int, default=200, help="of the second training")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="accuracy over seconds on the link"
    )
    parser.add_argument("--store", help=argparse.SUPPRESS)  # set for the ranks
    options = parser.parse_args()
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data {options.data} is not a directory")
    return options


def codec(text: str) -> Method:
    try:
        return Method.parse(text).check()
    except gradwire.InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rank_main(options: argparse.Namespace) -> int:
    """One rank of the launch: trains every row; rank 0 prints the table."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), options.ranks
    store = dist.FileStore(options.store, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    data = images.load(options.data)
    on_link = "GRADWIRE_LINK" in os.environ
    if on_link:
        options.steps, trained = options.link_steps, LINK_CODECS
    else:
        trained = [Method(methods.GLOO), *options.codecs]
        if options.epochs is not None:
            options.steps = int(
                options.epochs * (len(data.train_labels) // (options.batch * ranks))
            )
    rows = [train_row(options, data, each, CHECKS if on_link else 0) for each in trained]
    if rank == 0:
        print_table(options, data, rows, on_link)
        if on_link and options.picture is not None:
            draw(options, data, rows)
    replicas.leave(store, rank, ranks)
    return 0 if all(row.identical for row in rows) else 1


def train_row(options: argparse.Namespace, data: images.Images, method: Method, checks: int) -> Row:
    """Trains from the start; looks at the test accuracy so many times on the way."""
    torch.manual_seed(options.seed)
    model = images.small_cnn(data.side)
    optimizer = method.optimizer(model, options.learning_rate)
    first_steps = round(method.first_share(WARM_UP) * options.steps)
    averaging = methods.average(model, method, options.algorithm, first_steps, optimizer)
    seconds: list[float] = []
    curve: list[tuple[float, float]] = []
    order = batches(options, data)
    dist.barrier()
    before = averaging.sent()
    progress = tqdm(
        total=options.steps,
        desc=f"{method.short_title:{WIDTH}}",
        unit="step",
        disable=dist.get_rank() != 0,
    )
    with progress:
        for part in order.tensor_split(checks or 1):
            seconds += train(part, data, averaging.ddp, optimizer, progress)
            if checks:
                accuracy = replicas.test_accuracy(averaging.ddp.module, data)
                curve.append((sum(seconds), accuracy))
    after = averaging.sent()
    sent = None if before is None or after is None else after - before
    row = Row(
        str(method),
        seconds,
        None if sent is None else replicas.mean(sent) / options.steps / MEGABYTE,
        replicas.test_accuracy(averaging.ddp.module, data),
        replicas.identical(averaging.ddp.module),
        curve,
    )
    averaging.close()
    return row


def batches(options: argparse.Namespace, data: images.Images) -> torch.Tensor:
    """The indices of this rank's images, a row a step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = len(data.train_labels)
    return images.batches(count, options.batch, rank, ranks, options.seed, options.steps)


def train(
    order: torch.Tensor,
    data: images.Images,
    ddp: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: tqdm,
) -> list[float]:
    """Seconds of every step."""
    seconds = []
    for chosen in order:
        started = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(ddp(data.train_images[chosen]), data.train_labels[chosen]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        progress.update()
    return seconds


def print_table(
    options: argparse.Namespace, data: images.Images, rows: list[Row], on_link: bool
) -> None:
    where = f", over emulated links of {options.link}" if on_link else ""
    print(
        f"\n{data.name}, {len(data.train_labels):,} images: {options.steps:,} steps on "
        f"{options.ranks} ranks, {options.batch} images each{where}\n\n"
        f"{'':{WIDTH}}  ms/step  seconds  MB sent/rank/step  test accuracy  "
        "replicas bit-identical"
    )
    titles = methods.titles(row.method for row in rows)
    for row in rows:
        megabytes = "–" if row.megabytes is None else f"{row.megabytes:.3f}"
        identical = "yes" if row.identical else "NO"
        print(
            f"{titles[row.method]:{WIDTH}}  {statistics.median(row.seconds) * 1e3:7.2f}  "
            f"{sum(row.seconds):7.1f}  {megabytes:>17}  {row.accuracy:13.2%}  {identical:>22}"
        )
    print("\n".join(methods.legend(titles)))


def draw(options: argparse.Namespace, data: images.Images, rows: list[Row]) -> None:
    """Writes the picture: accuracy over seconds, a line a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    titles = methods.titles(row.method for row in rows)
    for row in rows:
        seconds, accuracies = zip(*row.curve, strict=True)
        label = f"{titles[row.method]}: {seconds[-1]:.1f} s"
        axes.plot(seconds, [100 * each for each in accuracies], marker=".", label=label)
    axes.set(
        title=f"{options.steps} steps on {options.ranks} ranks, links of {options.link}",
        xlabel="seconds of training",
        ylabel=f"test accuracy, {data.name} (%)",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(options.picture, dpi=110)
    print(f"wrote {options.picture}")


if __name__ == "__main__":
    sys.exit(main())
