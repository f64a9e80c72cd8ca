"""Trains a small CNN on local ranks: torch's own gloo DDP first, then gradwire's hook per codec.

Every row starts from the same parameters and sees the same images in the same order. Exits with 1
if the replicas of some row differ. `make demo` runs it; see --help for what can be changed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

try:
    import sklearn  # noqa: F401  bundles the digits
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm
except ImportError as missing:
    sys.exit(f"the demo needs {missing.name}: pip install 'gradwire[demo]', or run `make demo`")

import gradwire.torch
import images
from gradwire import _core, _launch

GLOO = "gloo DDP"
MEGABYTE = 1e6


class Row(NamedTuple):
    """What one training run measured; the same on every rank, but for the rank's own time."""

    name: str
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
    parser.add_argument("--codecs", default="none,fp16,bf16", help="with commas")
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
    try:
        for codec in options.codecs.split(","):
            _core.Codec(codec)
    except gradwire.InvalidArgument as error:
        parser.error(f"--codecs {options.codecs}: {error}")
    return options


def rank_main(options: argparse.Namespace) -> int:
    """One rank of the launch: trains every row; rank 0 prints the table."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), options.ranks
    store = dist.FileStore(options.store, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    data = images.load(options.data)
    if options.epochs is not None:
        options.steps = int(options.epochs * (len(data.train_labels) // (options.batch * ranks)))
    codecs = [None, *options.codecs.split(",")]
    rows = [train_row(options, data, codec) for codec in codecs]
    if rank == 0:
        print_table(options, data, rows)
    leave(store, rank, ranks)
    return 0 if all(row.identical for row in rows) else 1


def leave(store: dist.Store, rank: int, ranks: int) -> None:
    """Ends the process group and its threads, once no rank needs it any more.

    A thread of torch's gloo that lets go of a tensor while the interpreter shuts down aborts the
    process, and a model in a reference cycle keeps the group and its threads alive.
    """
    store.set(f"leaving/{rank}", b"")
    store.wait([f"leaving/{each}" for each in range(ranks)])
    gc.collect()
    dist.destroy_process_group()


def train_row(options: argparse.Namespace, data: images.Images, codec: str | None) -> Row:
    """Trains from the start; codec None is torch's own reduction over gloo."""
    torch.manual_seed(options.seed)
    ddp = DistributedDataParallel(images.small_cnn(data.side))
    if codec is None:
        name, sent = GLOO, tcp_bytes_sent
    else:
        name = f"gradwire {codec}"
        state = gradwire.torch.register(ddp, codec=codec, algorithm=options.algorithm)
        sent = traffic_of(state)
    seconds, traffic = train(options, data, ddp, name, sent)
    row = Row(
        name,
        statistics.median(seconds) * 1e3,
        None if traffic is None else mean_over_ranks(traffic) / options.steps / MEGABYTE,
        test_accuracy(ddp.module, data),
        all_equal(digest(ddp.module)),
    )
    if codec is not None:
        state.close()
    return row


def train(
    options: argparse.Namespace,
    data: images.Images,
    ddp: DistributedDataParallel,
    name: str,
    sent: Callable[[], int | None],
) -> tuple[list[float], int | None]:
    """Seconds of every step, and bytes that this rank sent in all of them."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=options.learning_rate, momentum=0.9)
    rank, ranks, seconds = dist.get_rank(), dist.get_world_size(), []
    order = images.batches(
        len(data.train_labels), options.batch, rank, ranks, options.seed, options.steps
    )
    dist.barrier()
    before = sent()
    for chosen in tqdm(order, desc=f"{name:14}", unit="step", disable=rank != 0):
        started = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(ddp(data.train_images[chosen]), data.train_labels[chosen]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    after = sent()
    return seconds, None if before is None or after is None else after - before


def traffic_of(state: gradwire.torch.State) -> Callable[[], int]:
    """Reads the communicator's counter."""
    return lambda: state.communicator.traffic.bytes_sent


def tcp_bytes_sent() -> int | None:
    """Bytes that this process's TCP connections have sent, by the kernel's count; None: unknown.

    gloo counts nothing itself.
    """
    total = 0
    for connection in tcp_connections():
        with connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) < 208:  # tcpi_bytes_sent came with Linux 4.19
            return None
        total += struct.unpack_from("=Q", info, 200)[0]
    return total


def tcp_connections() -> Iterator[socket.socket]:
    """Every open TCP socket of this process, as a duplicate to be closed."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed since it was listed
            continue
        internet = duplicate.family in (socket.AF_INET, socket.AF_INET6)
        if internet and duplicate.type == socket.SOCK_STREAM:
            yield duplicate
        else:
            duplicate.close()


def mean_over_ranks(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def test_accuracy(model: torch.nn.Module, data: images.Images) -> float:
    """The share of test images that is labelled right; every rank tests a part."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.inference_mode():
        labels = torch.cat([model(each).argmax(1) for each in data.test_images[mine].split(1000)])
        right = (labels == data.test_labels[mine]).sum()
    dist.all_reduce(right)
    return int(right) / len(data.test_labels)


def digest(model: torch.nn.Module) -> bytes:
    """SHA-256 of the parameters and buffers, with their names."""
    summed = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        summed.update(name.encode())
        summed.update(tensor.numpy().tobytes())
    return summed.digest()


def all_equal(own: bytes) -> bool:
    """Whether all ranks have the same bytes."""
    mine = torch.tensor(list(own), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return all(torch.equal(each, gathered[0]) for each in gathered)


def print_table(options: argparse.Namespace, data: images.Images, rows: list[Row]) -> None:
    print(
        f"\n{data.name}, {len(data.train_labels):,} images: {options.steps:,} steps on "
        f"{options.ranks} ranks, {options.batch} images each\n\n"
        f"{'':14}  ms/step  MB sent/rank/step  test accuracy  replicas bit-identical"
    )
    for row in rows:
        megabytes = "–" if row.megabytes is None else f"{row.megabytes:.3f}"
        identical = "yes" if row.identical else "NO"
        print(
            f"{row.name:14}  {row.milliseconds:7.2f}  {megabytes:>17}  {row.accuracy:13.2%}  "
            f"{identical:>22}"
        )


if __name__ == "__main__":
    sys.exit(main())
