"""One rank's work in codecs, beside torch's hooks and PyTorch code as GRACE has it, in one run.

    make test-cpp && python -m bench.codecs.codecs_compared

Writes a table to bench/results/. Each round measures every codec and its counterpart in turn, on
the same bucket: float32, normal, at 1 M elements and at the 6.5 M of DDP's 25 MB. Counted is the
processor time of one thread for one encode and one decode, no communication: whatever else the
machine does meets both. gradwire's side is a C++ program (codecs_local.cc), torch's has one thread.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import thread_time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from bench.common import report
from bench.common.machine import OtherLoad, describe
from bench.common.report import ROOT

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "release"  # of `make test-cpp`
BUCKETS = ((1024, 1024), (2560, 2560))  # rows and columns
DENSITY = 0.001
TAU = 3.307  # what that part of the values reaches, nearly

Encoder = Callable[[torch.Tensor], torch.Tensor]  # what is decoded of what it encodes


class Bucket:
    """What DDP hands to a hook: one gradient, and this rank alone."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient

    def buffer(self) -> torch.Tensor:
        """All of it, flat."""
        return self._gradient.view(-1)

    def gradients(self) -> list[torch.Tensor]:
        """Each in its shape."""
        return [self._gradient]

    def index(self) -> int:
        """Of the bucket in its step."""
        return 0

    def is_last(self) -> bool:
        """Whether the step ends with it."""
        return True


class Alone:
    """A process group of one rank, in which a sum is at hand at once."""

    def size(self) -> int:
        """Ranks."""
        return 1

    def all_reduce(self, tensor: torch.Tensor, **_: object) -> Alone:
        """The tensor as it is."""
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result([tensor])
        return self

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """What all_reduce() gave last."""
        return self._future


def onebit(v: torch.Tensor) -> torch.Tensor:
    """The signs, and the means of both halves."""
    negative = v < 0
    below, above = v[negative].mean(), v[~negative].mean()
    return torch.where(negative, below, above)


def int8(v: torch.Tensor) -> torch.Tensor:
    """Bytes in units of the largest magnitude."""
    scale = v.abs().max() / 127
    return (v / scale).round().to(torch.int8).to(torch.float32) * scale


def topk(v: torch.Tensor) -> torch.Tensor:
    """The largest of all, and where they are."""
    _, index = torch.topk(v.abs(), max(1, int(DENSITY * v.numel())), sorted=False)
    return torch.zeros_like(v).scatter_(0, index, v[index])


def threshold(v: torch.Tensor) -> torch.Tensor:
    """The sign of what reaches the threshold, and where it is."""
    (index,) = (v.abs() >= TAU).nonzero(as_tuple=True)
    return torch.zeros_like(v).scatter_(0, index, v[index].sign() * TAU)


def with_memory(encode: Encoder, x: torch.Tensor) -> Callable[[], object]:
    """GRACE's residual memory around it: v = x + e, e' = v - decoded."""
    residual = 0.1 * torch.randn(x.numel())

    def run() -> object:
        v = x.view(-1) + residual
        decoded = encode(v)
        return v - decoded, decoded

    return run


def hooked(hook: Callable[..., object], state: object, x: torch.Tensor) -> Callable[[], object]:
    """A hook of torch on a bucket of its own."""
    bucket = Bucket(x.clone())

    def run() -> object:
        return hook(state, bucket)

    return run


def powered(x: torch.Tensor) -> Callable[[], object]:
    """torch's PowerSGD hook with feedback and warm start, past its first iterations."""
    state = power_sgd.PowerSGDState(Alone(), matrix_approximation_rank=4)
    state.iter = state.start_powerSGD_iter
    return hooked(power_sgd.powerSGD_hook, state, x)


def cast_hook(hook: Callable[..., object], x: torch.Tensor) -> Callable[[], object]:
    """torch's hook that halves the bytes; it has no feedback."""
    return hooked(hook, Alone(), x)


# A codec of gradwire, whether with feedback, what it stands beside, and that.
Row = tuple[str, bool, str, Callable[[torch.Tensor], Callable[[], object]]]
ROWS: tuple[Row, ...] = (
    ("fp16", False, "torch's fp16 hook", lambda x: cast_hook(default_hooks.fp16_compress_hook, x)),
    ("fp16", True, "the same", lambda x: cast_hook(default_hooks.fp16_compress_hook, x)),
    ("bf16", False, "torch's bf16 hook", lambda x: cast_hook(default_hooks.bf16_compress_hook, x)),
    ("int8", True, "absmax of all, as GRACE", lambda x: with_memory(int8, x)),
    ("onebit", True, "sign and two means, as GRACE", lambda x: with_memory(onebit, x)),
    (f"threshold:tau={TAU}", True, "mask, as GRACE", lambda x: with_memory(threshold, x)),
    (f"topk:density={DENSITY}", True, "torch.topk, as GRACE", lambda x: with_memory(topk, x)),
    ("lowrank", True, "torch's PowerSGD hook, rank 4", powered),
)


class Program:
    """codecs_local.cc, built and running."""

    def __init__(self, binary: str) -> None:
        self._process = subprocess.Popen(
            [binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, codec: str, shape: tuple[int, int], feedback: bool) -> float:
        """Of one encode and decode."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{codec} {shape[0]} {shape[1]} {int(feedback)}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        """Closes its input, and waits."""
        self._process.communicate()


@contextmanager
def built(build: Path) -> Iterator[Program]:
    """The program, linked with the libraries of a build tree."""
    with tempfile.TemporaryDirectory() as folder:
        binary = f"{folder}/codecs_local"
        libraries = [str(build / f"libgradwire_{name}.a") for name in ("codec", "base")]
        source = [f"-I{ROOT / 'csrc'}", str(HERE / "codecs_local.cc")]
        subprocess.run(["g++", "-O3", "-std=c++20", *source, "-o", binary, *libraries], check=True)
        program = Program(binary)
        try:
            yield program
        finally:
            program.end()


def measure(program: Program, shape: tuple[int, int], rounds: int) -> list[str]:
    """The table for one bucket."""
    x = torch.randn(*shape)
    others = [make(x) for *_, make in ROWS]
    times: list[list[tuple[float, float]]] = [[] for _ in ROWS]
    for _ in range(rounds):
        for (codec, feedback, *_), other, found in zip(ROWS, others, times, strict=True):
            start = thread_time()
            other()
            theirs = thread_time() - start
            found.append((program.seconds(codec, shape, feedback), theirs))
    rows = []
    for (codec, feedback, title, _), found in zip(ROWS, times, strict=True):
        ours, theirs, ratio = (
            statistics.median(values)
            for values in zip(*((a, b, b / a) for a, b in found[1:]), strict=True)
        )
        name = codec + ("" if feedback else ", no feedback")
        rows.append(f"{name} | {1e3 * ours:.2f} | {title} | {1e3 * theirs:.2f} | {ratio:.1f}×")
    return report.table("gradwire | ms | beside it | ms | times as long", rows, "lrlrr")


def main() -> None:
    """Measures, prints and writes the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--build", type=Path, default=BUILD, help="a tree, with libgradwire_codec.a"
    )
    parser.add_argument("--rounds", type=int, default=16, help="of which the first does not count")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load, tables = OtherLoad(), []
    with built(options.build) as program, mock.patch.object(dist, "all_reduce", Alone().all_reduce):
        for shape in BUCKETS:
            tables.append(f"## {shape[0]} × {shape[1]} = {shape[0] * shape[1]:,} elements\n")
            tables += [*measure(program, shape, options.rounds), ""]
    head = HEAD.format(
        day=datetime.date.today(),
        machine=describe(),
        load=load.share(),
        torch=torch.__version__,
        rounds=options.rounds - 1,
    )
    text = head + "\n".join(tables)
    report.save(report.stem_of(None, "codecs"), None, text)
    print(text)


HEAD = """# One rank's work in codecs, beside torch's hooks and GRACE's way

{day}; {machine}, of whose time other work took about {load:.0%}; torch {torch};
`python -m bench.codecs.codecs_compared`.

Milliseconds of one thread's processor time for one encode and one decode of one bucket, no
communication; medians of {rounds} rounds in which all take turns, and the median of the ratios of
the two in the same round. torch has one thread, too. With feedback, both sides add a residual and
write a new one beside it. torch's hooks run as they are, in a group of one rank whose sums are at
hand at once; the fp16 and bf16 hooks divide by the number of ranks, and feed nothing back. GRACE's
way is PyTorch: neither bits nor positions are packed; int8 has one scale for all of the bucket;
onebit picks the halves by boolean indexing; topk takes the largest of all, where gradwire takes
those of each 32,768. torch's side allocates what it returns at each call, as it does in training;
gradwire's arrays are there before, as in training.

"""

if __name__ == "__main__":
    main()
