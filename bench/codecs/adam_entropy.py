"""What an entropy code could make of Adam's float32 states: bytes by several contexts, as a table.

    python -m bench.codecs.adam_entropy

The states are those of `bench.codecs.lossless`. Codes are perfect and tables free, so real coders
need more. Writes bench/results/adam-entropy-DATE.md; it takes minutes.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bench.codecs.lossless import Training
from bench.common import report
from bench.common.machine import describe

_Whole = NDArray[np.int64]
_SIGNS = (1, 1, 0)  # bits: exp_avg_sq needs none


class State:
    """Parameters, or a moment."""

    def __init__(self, tensors: list[NDArray[np.float32]]) -> None:
        self._tensors = tensors
        self.count = sum(each.size for each in tensors)

    def each(self, mantissa: int = 0) -> list[_Whole]:
        """The exponents of each tensor, with so many bits of mantissas."""
        bits = [each.view(np.uint32).astype(np.int64) for each in self._tensors]
        return [(each & 0x7FFFFFFF) >> (23 - mantissa) for each in bits]

    def flat(self, mantissa: int = 0) -> _Whole:
        """The same of all tensors."""
        return np.concatenate([each.reshape(-1) for each in self.each(mantissa)])

    def means(self, mantissa: int = 0, *, columns: bool) -> NDArray[np.float64]:
        """For each element the mean of its row, and its column's beyond that of all."""
        found = []
        for each in self.each(mantissa):
            grid = each.reshape(len(each), -1) if each.ndim > 1 else each.reshape(1, -1)
            mean = grid.mean(1, keepdims=True) + 0.0 * grid
            if columns and each.ndim > 1:
                mean += grid.mean(0, keepdims=True) - grid.mean()
            found.append(mean.reshape(-1))
        return np.concatenate(found)

    def beyond(self, mantissa: int) -> _Whole:
        """How far each element is from its row's and column's mean, in steps of its mantissa."""
        mean = np.rint(self.means(mantissa, columns=True)).astype(np.int64)
        return np.clip(self.flat(mantissa) - mean, -4096, 4095)


def bits(codes: _Whole, context: _Whole | None = None) -> float:
    """The entropy of all codes, where the context is known."""
    if context is None:
        counts = np.unique(codes, return_counts=True)[1].astype(float)
        return -float((counts * np.log2(counts / counts.sum())).sum())
    context = context - context.min()
    return bits(context * (1 << 20) + codes - codes.min()) - bits(context)


def parts(values: NDArray[np.float64], count: int) -> _Whole:
    """Contexts of about as many elements each."""
    return np.searchsorted(np.quantile(values, np.linspace(0, 1, count + 1)[1:-1]), values)


def tries(states: list[State]) -> Iterator[tuple[str, list[float]]]:
    """Codes, and the bits of the exponents of each state."""
    flat = [each.flat() for each in states]
    yield "a table for each state", [bits(each) for each in flat]
    yield (
        "a table for each 4,096 elements, 8 bytes each",
        [sum(bits(x[i : i + 4096]) + 64 for i in range(0, len(x), 4096)) for x in flat],
    )
    yield "a table for each tensor", [sum(bits(x.reshape(-1)) for x in s.each()) for s in states]
    previous = [parts((np.roll(x, 1) + np.roll(x, 2)) / 2.0, 16) for x in flat]
    yield "16 contexts: two previous exponents", list(map(bits, flat, previous))
    for count in (4, 64):
        rows = [parts(each.means(columns=False), count) for each in states]
        yield f"{count} contexts: the mean of the row", list(map(bits, flat, rows))
    both = [parts(each.means(columns=True), 64) for each in states]
    yield "64 contexts: the means of row and column", list(map(bits, flat, both))
    given = bits(flat[1], 1000 * flat[2] + parts(states[1].means(columns=True), 16))
    yield (
        "the same, and exp_avg by exp_avg_sq's exponent too",
        [bits(flat[0], both[0]), given, bits(flat[2], both[2])],
    )
    for more in (1, 4):
        fine = [bits(each.beyond(more)) - more * each.count for each in states]
        yield f"distance to row and column, mantissas' first {more} with it", fine
    second = bits(states[1].beyond(2), states[2].beyond(1)) - 2 * states[1].count
    yield "the same with 4, and exp_avg by exp_avg_sq's distance too", [fine[0], second, fine[2]]


def main() -> None:
    """Writes the table."""
    trained = Training()
    parameters = list(trained.model.parameters())
    kept = [trained.optimizer.state[each] for each in parameters]
    states = [State([each.detach().numpy() for each in parameters])]
    states += [State([each[name].numpy() for each in kept]) for name in ("exp_avg", "exp_avg_sq")]
    rows = []
    for what, exponents in tries(states):
        per = [each / states[0].count for each in exponents]
        share = sum(23 + sign + each for sign, each in zip(_SIGNS, per, strict=True)) / 96
        shown = " | ".join(f"{each:.2f}" for each in per)
        rows.append(f"{what} | {shown} | {100 * share:.1f} %")
    head = "exponents by | parameters, bits | exp_avg | exp_avg_sq | bytes of all"
    stem = report.stem_of(None, "adam-entropy")
    about = f"{datetime.date.today()}; {describe()}; `python -m bench.codecs.adam_entropy`."
    title = f"# {stem.name}: entropy of Adam's float32 states"
    report.save(
        stem, None, "\n".join([title, "", about, "", *report.table(head, rows, "lrrrr"), ""])
    )


if __name__ == "__main__":
    main()
