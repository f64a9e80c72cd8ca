"""Collectives of virtual ranks, threads on one GPU: the bits of the same calls on the CPU.

Every algorithm of every collective, dtypes and operations, every codec on
every schedule with error feedback over three calls, results and residuals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import gradwire
from gradwire.lab.tuning.measure import COLLECTIVES

from tests.gpu import arrays
from tests.gpu.calls import Case, problems
from tests.gpu.rows import Row

SIZES = (2, 3, 1, 4, 5, 8)  # ranks; two first, since most that can go wrong goes wrong there
CODECS = (
    "fp16",
    "fp16:scale=1024",
    "bf16",
    "int8",
    "int8:rounding=stochastic,seed=5",
    "int4",
    "onebit",
    "onebit:block=64",
    "threshold",
    "threshold:tau=0.5",
    "topk",
    "topk:density=0.3,values=fp16",
)
_OPS = ("sum", "avg", "min", "max", "prod")
_SECONDS = 60.0  # of a wait


class Extent(NamedTuple):
    """How much is checked."""

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    coded: tuple[int, ...]  # lengths with a codec
    shifts: tuple[int, ...]
    codecs: tuple[str, ...]
    matrices: tuple[tuple[int, ...], ...]


FULL = Extent(
    SIZES,
    (0, 1, 3, 1001, 40_003),
    (3001, 1, 100_001),
    (0, 1),
    CODECS,
    ((40, 60), (33,), (64, 25), (500, 301)),
)
SMALL = Extent((3,), (0, 101), (257,), (1,), ("int8", "onebit", "topk"), ((9, 8), (5,)))


def main() -> int:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", action="store_true")
    simulated = parser.parse_args().simulated
    place = arrays.place(simulated)
    extent = SMALL if simulated else FULL
    for p in extent.sizes:
        for group, cases in groups(extent, p, place.dtypes):
            check(group, p, cases, place)
    if not simulated:
        _check_cupy()
    return 0


def _check_cupy() -> None:
    """Arrays of a library whose streams are found otherwise than torch's."""
    try:
        place = arrays.Cupy()
    except ImportError as error:
        with Row("CuPy's arrays", "p=2") as row:
            row.skip(str(error))
        return
    cases = [*_in_place(FULL), *coded("onebit", FULL), *_several()]
    check("CuPy's arrays", 2, cases, place)


def check(group: str, p: int, cases: Sequence[Case], place: arrays.Place) -> None:
    """A row of these cases on p ranks."""
    # Without feedback these draw by the number of the call, and the CPU's call comes first.
    cases = [each for each in cases if each.feedback or "stochastic" not in each.codec]
    with Row(group, f"p={p}") as row:
        told = spawn(p, lambda comm: (*problems(comm, cases, place), comm._gpu.links))
        assert {links for *_, links in told} == {"loopback"} or p == 1, told
        refused = told[0][1]
        row.expect_none([each for found, *_ in told for each in found], len(cases) - refused)
        row.expect(refused < len(cases) / 2, f"{refused} of {len(cases)} cases are refused")


def spawn(p: int, body: Callable[[gradwire.Communicator], Any]) -> list[Any]:
    """Of ranks that are threads."""
    return gradwire.spawn(body, p, threads=True, timeout=_SECONDS)


def groups(extent: Extent, p: int, dtypes: Sequence[str]) -> Iterator[tuple[str, list[Case]]]:
    """What is checked of p ranks, by group."""
    for collective in COLLECTIVES:
        algorithms = gradwire.algorithms(collective)
        algorithms += ["gather"] if collective == "all_reduce" else []
        yield (
            collective,
            [
                Case(collective, algorithm, n, shift=shift)
                for algorithm, n, shift in product(algorithms, extent.lengths, extent.shifts)
            ],
        )
    yield "dtypes and operations", [*_of_every_dtype(dtypes)]
    yield "in place and asynchronous", [*_in_place(extent)]
    for codec in extent.codecs:
        yield f"codec {codec}", [*coded(codec, extent)]
    yield "codec lowrank", [*_low_rank(extent)]
    yield "several arrays and keys", [*_several()]


def _of_every_dtype(dtypes: Sequence[str]) -> Iterator[Case]:
    for dtype, op in product(dtypes, _OPS):
        for algorithm in ("ring", "recursive_doubling", "gather"):
            yield Case("all_reduce", algorithm, 1003, dtype, op)


def _in_place(extent: Extent) -> Iterator[Case]:
    for n, asynchronous in product(extent.lengths, (False, True)):
        for algorithm in ("ring", "direct"):
            yield Case(
                "all_reduce", algorithm, n, calls=2, in_place=True, asynchronous=asynchronous
            )


def coded(codec: str, extent: Extent) -> Iterator[Case]:
    """Of every schedule; one that is no tree has no use for a codec, and both devices refuse it."""
    for collective in ("all_reduce", "reduce_scatter", "reduce"):
        lengths = extent.coded if collective == "all_reduce" else extent.coded[:1]
        algorithms = [*gradwire.algorithms(collective), "gather"]
        kinds = [(n, True) for n in lengths] + [(extent.coded[0], False)]
        for algorithm, (n, feedback) in product(algorithms, kinds):
            yield Case(
                collective,
                algorithm,
                n,
                op="avg",
                codec=codec,
                feedback=feedback,
                calls=3 if feedback else 1,
                shift=n % 2,
            )


def _low_rank(extent: Extent) -> Iterator[Case]:
    for feedback, algorithm in product((True, False), ("ring", "halving_doubling")):
        yield Case(
            "all_reduce",
            algorithm,
            op="avg",
            codec="lowrank:rank=2",
            feedback=feedback,
            calls=3 if feedback else 1,
            shapes=extent.matrices,
        )


def _several() -> Iterator[Case]:
    """Keys that end where arrays don't, and a plain call that delivers residuals."""
    for codec, algorithm in product(("int8", "threshold", "none"), ("ring", "gather", "direct")):
        yield Case(
            "all_reduce",
            algorithm,
            codec=codec,
            feedback=True,
            calls=3,
            shapes=((1000,), (24,), (7, 11)),
            keys=(("w", 700), ("b", 324), ("c", 77)),
        )


if __name__ == "__main__":
    sys.exit(main())
