"""Trains a small CNN on local ranks: torch's own gloo DDP first, then gradwire's hook per codec.

Every row starts from the same parameters and sees the same images in the same order. Exits with 1
if the replicas of some row differ. `make demo` runs it; see --help for what can be changed.
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
    sys.exit(f"the demo needs {missing.name}: pip install 'gradwire[demo]', or run `make demo`")

import gradwire
import images
import methods
import replicas
from gradwire import _launch
from methods import Method
from train_runs import WARM_UP

CODECS = [Method.parse(each) for each in ("none", "fp16", methods.ONEBIT, methods.THRESHOLD)]
MEGABYTE = 1e6
WIDTH = 18  # of a title


class Row(NamedTuple):
    """What one training run measured; the same on every rank, but for the rank's own time."""

    method: str
    milliseconds: float  # per step, median
    megabytes: float | None  # sent per rank and step, mean over ranks; None: not to be known
    accuracy: float
    identical: bool


def main() -> int:
    options = parse_options()
    if "RANK" in os.environ:
        return rank_main(options)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        program = [__file__, *sys.argv[1:], "--store", f"{scratch}/store"]
        return _launch.run(["-n", str(options.ranks), *program])


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
    if options.epochs is not None:
        options.steps = int(options.epochs * (len(data.train_labels) // (options.batch * ranks)))
    rows = [train_row(options, data, each) for each in (Method(methods.GLOO), *options.codecs)]
    if rank == 0:
        print_table(options, data, rows)
    replicas.leave(store, rank, ranks)
    return 0 if all(row.identical for row in rows) else 1


def train_row(options: argparse.Namespace, data: images.Images, method: Method) -> Row:
    """Trains from the start."""
    torch.manual_seed(options.seed)
    model = images.small_cnn(data.side)
    optimizer = method.optimizer(model, options.learning_rate)
    first_steps = round(method.first_share(WARM_UP) * options.steps)
    averaging = methods.average(model, method, options.algorithm, first_steps, optimizer)
    seconds, traffic = train(options, data, averaging, optimizer, method.short_title)
    row = Row(
        str(method),
        statistics.median(seconds) * 1e3,
        None if traffic is None else replicas.mean(traffic) / options.steps / MEGABYTE,
        replicas.test_accuracy(averaging.ddp.module, data),
        replicas.identical(averaging.ddp.module),
    )
    averaging.close()
    return row


def train(
    options: argparse.Namespace,
    data: images.Images,
    averaging: methods.Averaging,
    optimizer: torch.optim.Optimizer,
    title: str,
) -> tuple[list[float], int | None]:
    """Seconds of every step, and bytes that this rank sent in all of them."""
    ddp = averaging.ddp
    rank, ranks, seconds = dist.get_rank(), dist.get_world_size(), []
    order = images.batches(
        len(data.train_labels), options.batch, rank, ranks, options.seed, options.steps
    )
    dist.barrier()
    before = averaging.sent()
    for chosen in tqdm(order, desc=f"{title:{WIDTH}}", unit="step", disable=rank != 0):
        started = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(ddp(data.train_images[chosen]), data.train_labels[chosen]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    after = averaging.sent()
    return seconds, None if before is None or after is None else after - before


def print_table(options: argparse.Namespace, data: images.Images, rows: list[Row]) -> None:
    print(
        f"\n{data.name}, {len(data.train_labels):,} images: {options.steps:,} steps on "
        f"{options.ranks} ranks, {options.batch} images each\n\n"
        f"{'':{WIDTH}}  ms/step  MB sent/rank/step  test accuracy  replicas bit-identical"
    )
    titles = methods.titles(row.method for row in rows)
    for row in rows:
        megabytes = "–" if row.megabytes is None else f"{row.megabytes:.3f}"
        identical = "yes" if row.identical else "NO"
        print(
            f"{titles[row.method]:{WIDTH}}  {row.milliseconds:7.2f}  {megabytes:>17}  "
            f"{row.accuracy:13.2%}  {identical:>22}"
        )
    print("\n".join(methods.legend(titles)))


if __name__ == "__main__":
    sys.exit(main())
