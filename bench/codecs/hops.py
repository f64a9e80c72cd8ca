"""What codecs of few bits lose of a small transformer's gradients, after one hop and after several.

    python -m bench.codecs.hops

A language model of 636,160 parameters learns the standard library's text with AdamW. Of some steps
eight ranks' gradients, each of a batch of its own, are encoded and decoded once, and summed over 2,
4 and 8 ranks by a ring, which encodes partial sums anew at each hop, and by the direct schedule,
which encodes each gradient and the sum. Writes bench/results/hops-DATE.md.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

import gradwire
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from bench.common import report
from bench.common.machine import describe
from bench.training.models.text import standard_library, windows
from bench.training.models.transformers import LanguageModel

RANKS, SIZES, STEPS = 8, (2, 4, 8), (5, 50, 300)
BATCH, CONTEXT, RATE = 16, 64, 1e-3
ALGORITHMS = ("ring", "direct")
CODECS = (
    "int8",
    "int8:block=32",
    "int4",
    "int4:block=64",
    "int4:block=128",
    "int4:rounding=stochastic",
)

Gradients = list[npt.NDArray[np.float32]]  # of each parameter


def gradients(steps: Sequence[int], ranks: int = RANKS) -> Iterator[list[Gradients]]:
    """Yields all ranks' gradients at each of the steps."""
    torch.manual_seed(1)
    text, draws = standard_library().seen, torch.Generator().manual_seed(1)
    model = LanguageModel(128, 3, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def one() -> Gradients:
        starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,), generator=draws)
        chosen = windows(text, starts, CONTEXT)
        optimizer.zero_grad()
        cross_entropy(model(chosen[:, :-1]), chosen[:, 1:].reshape(-1)).backward()
        return [each.grad.numpy().copy() for each in model.parameters() if each.grad is not None]

    for step in range(max(steps) + 1):
        if step in steps:
            yield [one() for _ in range(ranks)]
        one()
        optimizer.step()


def one_hop(codec: str, given: Gradients) -> tuple[float, float]:
    """The bits an element, and what is lost of the squares, in encoding once."""
    its = gradwire.codec.get(codec)
    payloads = [its.encode(each) for each in given]
    decoded = [its.decode(p, x.shape) for p, x in zip(payloads, given, strict=True)]
    bits = 8 * sum(each.nbytes for each in payloads) / sum(each.size for each in given)
    return bits, lost(decoded, given)


def several_hops(codec: str, algorithm: str, given: list[Gradients]) -> float:
    """What is lost of the squares of the sum over so many ranks."""

    def rank(comm: gradwire.Communicator) -> Gradients:
        out = [np.empty_like(each) for each in given[comm.rank]]
        comm.all_reduce(given[comm.rank], codec=codec, algorithm=algorithm, out=out)
        return out

    sums = gradwire.spawn(rank, len(given), threads=True)[0]
    return lost(sums, [np.sum(each, 0, np.float64) for each in zip(*given, strict=True)])


def lost(found: Gradients, true: Sequence[npt.NDArray[np.floating]]) -> float:
    """The squares of all differences, over those of the true values."""
    pairs = [(f.astype(np.float64), t.astype(np.float64)) for f, t in zip(found, true, strict=True)]
    return float(sum(((f - t) ** 2).sum() for f, t in pairs) / sum((t**2).sum() for _, t in pairs))


def rows(codecs: Sequence[str], found: Sequence[list[Gradients]]) -> Iterator[str]:
    """Of each codec: bits, and losses that are averaged over the steps."""
    for codec in codecs:
        hops = [one_hop(codec, ranks[0]) for ranks in found]
        losses = [float(np.mean([its for _, its in hops]))]
        losses += [
            float(np.mean([several_hops(codec, algorithm, ranks[:size]) for ranks in found]))
            for algorithm in ALGORITHMS
            for size in SIZES
        ]
        cells = " | ".join(f"{each:.2g}" for each in losses)
        yield f"`{codec}` | {hops[0][0]:.2f} | {cells}"


def document(found: Sequence[list[Gradients]]) -> str:
    """The report."""
    head = "codec | bits | one hop | "
    head += " | ".join(f"{a}, {n} ranks" for a in ALGORITHMS for n in SIZES)
    return report.document(
        "What few bits lose",
        f"{datetime.date.today()}; {describe()}; `python -m bench.codecs.hops`.",
        "Squares of what is lost over those of the true gradient, or of the true sum over the "
        f"ranks; means over steps {', '.join(map(str, STEPS))} of a language model of 636,160 "
        "parameters with AdamW. No error feedback. *Bits* are those of a payload, an element, all "
        "parameters together.",
        report.table(head, rows(CODECS, found), "r"),
    )


def main() -> None:
    """Measures, and writes the report."""
    torch.set_num_threads(1)
    text = document(list(gradients(STEPS)))
    report.save(report.stem_of(None, "hops"), None, text)
    print(text)


if __name__ == "__main__":
    main()
