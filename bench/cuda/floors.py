"""The fewest bytes that each kernel of gradwire's CUDA part can move, an element of float32.

x, e (what was not sent before), e', sums and results are 4 bytes each; what is on the wire is 2 in
fp16, 1 in int8, and an eighth in onebit, with one scale of 4 bytes (int8) or two of them (onebit)
for each 1,024 elements; and of one in 100 elements a position of a byte, with the sign (threshold)
or the value (topk).
"""

from __future__ import annotations

from typing import NamedTuple

GOAL = 0.85  # of a copy's bandwidth, on these bytes
BLOCK, LARGE_BLOCK = 1024, 8192  # elements
PAYLOADS = 8  # that are summed
DENSITY = 0.01


class Floor(NamedTuple):
    """Of one job of gpu_jobs.cc."""

    job: str
    bytes: float  # an element
    formula: str
    beside: str = ""  # what torch does of the same (torch_jobs.py); empty: nothing


_BIT = 1 / 8 + 8 / BLOCK
_BYTE = 1 + 4 / BLOCK
_SIGN, _VALUE = 1 + 1 / 8, 1 + 4  # of what is sent

FLOORS = (
    Floor("fold", 12, "r, g read; r written", "add_"),
    Floor("fp16 encode", 6, "x read; half written", "cast, then divide"),
    Floor("fp16 encode, feedback", 14, "x, e read; half, e' written", "add, cast, subtract"),
    Floor("fp16 decode-add", 10, "half, y read; y written", "add_ of halves"),
    Floor("fp16 ring round", 8, "half, own read; half written", "add_ of halves, cast"),
    Floor("bf16 encode", 6, "x read; half written", "cast, then divide"),
    Floor("int8 encode, feedback", 12 + _BYTE, "x, e read; byte, e' written", "absmax, round"),
    Floor("int8 decode-add", 8 + _BYTE, "byte, y read; y written", "multiply, add_"),
    Floor("onebit encode, feedback", 12 + _BIT, "x, e read; bit, e' written", "sign and pack"),
    Floor(
        f"onebit encode, feedback, blocks of {LARGE_BLOCK}",
        12 + 1 / 8 + 8 / LARGE_BLOCK,
        "x, e read; bit, e' written",
        "sign and pack",
    ),
    Floor("onebit decode-add", 8 + _BIT, "bit, y read; y written", "unpack and add"),
    Floor("onebit sum of 8", 4 + PAYLOADS * _BIT, "p bits read; y written", "unpack and add"),
    Floor(
        "onebit owner's stage of 8",
        16 + PAYLOADS * _BIT,
        "x, e, p - 1 bits read; bit, e', y written",
        "unpack, add, sign and pack",
    ),
    Floor(
        "threshold encode, feedback",
        12 + _SIGN * DENSITY,
        "x, e read; e', position and sign of each sent written",
        "mask, nonzero",
    ),
    Floor(
        "threshold decode", 4 + _SIGN * DENSITY, "what is sent read; y written", "zero_, index_put_"
    ),
    Floor(
        "topk encode, feedback",
        12 + _VALUE * DENSITY,
        "x, e read; e', position and value of each sent written",
        "torch.topk",
    ),
    Floor("topk decode", 4 + _VALUE * DENSITY, "what is sent read; y written", "zero_, index_put_"),
    Floor("lowrank, rank 4", 28, "x, e, v, v read; v, y, e' written", "PowerSGD's steps"),
)

SIZES = (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)  # elements


def share(floor: Floor, n: int, seconds: float, copy_bytes: float) -> float:
    """Of a copy's bandwidth (bytes read and written a second), on the floor's bytes."""
    return floor.bytes * n / seconds / copy_bytes
