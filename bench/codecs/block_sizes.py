"""What the size of a block costs and buys, for int8 and onebit, on the gradients of a training.

    python -m bench.codecs.block_sizes

Four ranks train the network of `images.py` on Fashion-MNIST with dense averages. From step 100 on,
for 100 steps, each rank's gradient, all parameters in one vector, also goes through every codec
with every size of block, each with error feedback of its own. Writes bench/results/blocks-DATE.md.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import gradwire
import numpy as np
import torch
from torch.nn.functional import cross_entropy

from bench.common import report
from bench.common.machine import OtherLoad, describe
from bench.training import images

RANKS, BATCH, HIDDEN, RATE = 4, 16, 640, 0.05
FIRST, STEPS = 100, 100  # steps before, and those that are measured
BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CODECS = ("int8", "onebit")


class Found(NamedTuple):
    """Of one codec with one size of block."""

    codec: str
    block: int
    kilobytes: float  # that a rank sends a step
    ratio: float  # of dense bytes, those of a ring
    error: float  # of what a call delivers, relative to the true sum: Euclidean norms, median
    owed: float  # norm of all ranks' residuals after the last step, relative to a sum's
    nanoseconds: float  # by the clock, an element and step: encoding and decoding, one rank


class Trial:
    """One codec with one size of block, on one rank."""

    def __init__(self, comm: gradwire.Communicator, codec: str, block: int) -> None:
        self._comm, self._codec, self._block = comm, codec, block
        self._feedback = gradwire.ErrorFeedback()
        self._errors: list[float] = []
        self._bytes, self._seconds, self._elements = 0, 0.0, 0

    def step(self, gradient: np.ndarray, true_sum: np.ndarray) -> None:
        """Every rank calls it with its own gradient."""
        before = self._comm.traffic
        delivered = self._comm.all_reduce(
            gradient,
            codec=f"{self._codec}:block={self._block}",
            feedback=self._feedback,
            key="all",
            out=np.empty_like(gradient),
        )
        after = self._comm.traffic
        self._bytes += after.bytes_sent - before.bytes_sent
        self._seconds += after.encode_seconds - before.encode_seconds
        self._seconds += after.decode_seconds - before.decode_seconds
        self._elements += gradient.size
        self._errors.append(_norm(delivered - true_sum) / _norm(true_sum))

    def found(self, true_sum: np.ndarray) -> Found:
        """After the last step, whose sum it was; every rank calls it."""
        residuals = self._comm.all_reduce(self._feedback.residual("all"))
        sent = self._comm.all_reduce(np.array([self._bytes], np.float64), op="avg")[0] / STEPS
        dense = 2 * (RANKS - 1) / RANKS * true_sum.nbytes
        return Found(
            self._codec,
            self._block,
            sent / 1e3,
            dense / sent,
            statistics.median(self._errors),
            _norm(residuals) / _norm(true_sum),
            self._seconds / self._elements * 1e9,
        )


def measure(comm: gradwire.Communicator) -> list[Found]:
    """One rank of the training."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = images.load_fashion_mnist()
    model = images.small_cnn(data.side, HIDDEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    trials = [Trial(comm, codec, block) for codec in CODECS for block in BLOCKS]
    order = images.batches(len(data.train_labels), BATCH, comm.rank, RANKS, 1, FIRST + STEPS)
    true_sum = np.empty(0, np.float32)
    for step, chosen in enumerate(order):
        optimizer.zero_grad()
        cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
        gradient = np.concatenate([each.grad.numpy().ravel() for each in model.parameters()])
        true_sum = comm.all_reduce(gradient, out=np.empty_like(gradient))
        if step >= FIRST:
            for trial in trials:
                trial.step(gradient, true_sum)
        _take(model, true_sum / RANKS)
        optimizer.step()
    return [each.found(true_sum) for each in trials]


def _take(model: torch.nn.Module, gradient: np.ndarray) -> None:
    done = 0
    for each in model.parameters():
        part = gradient[done : done + each.numel()]
        each.grad.copy_(torch.from_numpy(part).view_as(each))
        done += each.numel()


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def document(found: list[Found], load: float) -> Iterator[str]:
    """The report, line by line."""
    yield from ["# The size of a block: int8 and onebit", ""]
    yield (
        f"{datetime.date.today()}; {describe()}, of whose time other work took about {load:.0%}; "
        "`python -m bench.codecs.block_sizes`."
    )
    yield ""
    yield (
        f"Gradients of a CNN of 1.02 M parameters on Fashion-MNIST, {RANKS} ranks, steps {FIRST} "
        f"to {FIRST + STEPS}. *Error*: what one call delivers less the true sum, relative to it. "
        "*Owed*: all ranks' residuals after the last step, relative to one step's sum. Both are "
        "Euclidean norms. *ns*: time of encoding and decoding, by the clock, for each element of "
        "the input and step, on one rank; the ranks share the cores."
    )
    for codec in CODECS:
        yield from ["", f"## {codec}", ""]
        rows = (
            f"{each.block:,} | {each.kilobytes:.1f} | {each.ratio:.2f}× | "
            f"{each.error:.4f} | {each.owed:.4f} | {each.nanoseconds:.2f}"
            for each in found
            if each.codec == codec
        )
        yield from report.table("block | kB sent a step | ratio | error | owed | ns", rows, "r")


def main() -> None:
    """Measures, and writes the report."""
    images.load_fashion_mnist()  # installs it, where this user may
    load = OtherLoad()
    found = gradwire.spawn(measure, RANKS)[0]
    text = "\n".join(document(found, load.share())) + "\n"
    report.save(report.stem_of(None, "blocks"), None, text)
    print(text)


if __name__ == "__main__":
    main()
