"""The fewest bytes that each kernel of gradwire's CUDA part can move, an element of float32.

x, e (what was not sent before), e', sums and results are 4 bytes each; what is on the wire is 2 in
fp16, 1 in int8, and an eighth in onebit, with one scale of 4 bytes (int8) or two of them (onebit)
for each 1,024 elements; and of one in 100 elements a position of a byte, with the sign (threshold)
or the value (topk).

Some work is done by two kernels, of which the second reads what the first has written: they move
more than the work needs, and beyond the cache they can't get near its floor.
"""

from __future__ import annotations

from typing import NamedTuple

GOAL = 0.85  # of a copy's bandwidth, on these bytes
BLOCK = 1024  # elements
PAYLOADS = 8  # that are summed
DENSITY = 0.01


class Floor(NamedTuple):
    """Of one job of gpu_jobs.cc."""

    job: str
    bytes: float  # an element
    formula: str
    beside: str = ""  # what torch does of the same (gpu_torch_jobs.py); empty: nothing
    moved: float = 0  # an element, by two kernels; 0: it is one, or they are all needed

    @property
    def most(self) -> float:
        """The share of a copy's bandwidth that is left for the floor's bytes."""
        return self.bytes / self.moved if self.moved else 1


_BIT = 1 / 8 + 8 / BLOCK
_BYTE = 1 + 4 / BLOCK
_SIGN, _VALUE = 1 + 1 / 8, 1 + 4  # of what is sent

FLOORS = (
    Floor("fold", 12, "r, g read; r written", "add_"),
    Floor("fp16 encode", 6, "x read; half written", "cast, then divide"),
    Floor("fp16 encode, feedback", 14, "x, e read; half, e' written", "add, cast, subtract"),
    Floor("fp16 decode-add", 10, "half, y read; y written", "add_ of halves"),
    Floor("fp16 ring round", 8, "half, own read; half written", "add_ of halves, cast", 10 + 6),
    Floor("bf16 encode", 6, "x read; half written", "cast, then divide"),
    Floor("int8 encode, feedback", 12 + _BYTE, "x, e read; byte, e' written", "absmax, round"),
    Floor("int8 decode-add", 8 + _BYTE, "byte, y read; y written", "multiply, add_"),
    Floor("onebit encode, feedback", 12 + _BIT, "x, e read; bit, e' written", "sign and pack"),
    Floor("onebit sum of 8", 4 + PAYLOADS * _BIT, "p bits read; y written", "unpack and add"),
    Floor(
        "onebit owner's stage of 8",
        8 + _BIT + PAYLOADS * _BIT,
        "p bits, e read; bit, e' written",
        "unpack, add, sign and pack",
        4 + PAYLOADS * _BIT + 16 + _BIT,  # that of the sum, then y, e read and y, e' written
    ),
    Floor(
        "threshold encode, feedback",
        12 + _SIGN * DENSITY,
        "x, e read; e', position and sign of each sent written",
        "mask, nonzero",
    ),
    Floor(
        "topk encode, feedback",
        12 + _VALUE * DENSITY,
        "x, e read; e', position and value of each sent written",
        "torch.topk",
    ),
    Floor("lowrank, rank 4", 28, "x, e, v, v read; v, y, e' written", "PowerSGD's steps"),
)

SIZES = (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)  # elements


def share(floor: Floor, n: int, seconds: float, copy_bytes: float) -> float:
    """Of a copy's bandwidth (bytes read and written a second), on the floor's bytes."""
    return floor.bytes * n / seconds / copy_bytes
