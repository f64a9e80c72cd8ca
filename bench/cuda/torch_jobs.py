"""torch's own operations that do what a kernel of gradwire's CUDA part does, on its GPU.

As people write them: the casts of torch's communication hooks, GRACE's and signSGD's steps with the
sign really packed, torch.topk of all elements, and the steps of torch's PowerSGD hook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.cuda.floors import BLOCK, DENSITY, LARGE_BLOCK, PAYLOADS

DEVICE = "cuda"
_RANKS = 8  # by which averages divide
_TAU = 2.6
_RANK = 4


@dataclass
class Job:
    """Something to repeat on one set of arrays after the other."""

    run: Callable[[int], object]  # of a set
    waits: bool = False  # for the GPU, so no graph can hold it


def make(name: str, n: int, sets: int) -> Job:
    """The job of that name (floors.py) of n elements."""
    return _JOBS[name](n, sets)


def _normal(n: int, sets: int, scale: float = 1) -> list[torch.Tensor]:
    return [scale * torch.randn(n, device=DEVICE) for _ in range(sets)]


def _fold(n: int, sets: int) -> Job:
    y, x = _normal(n, sets), _normal(n, sets)
    return Job(lambda i: y[i].add_(x[i]))


def _cast(dtype: torch.dtype) -> Callable[[int, int], Job]:
    def made(n: int, sets: int) -> Job:
        x = _normal(n, sets)
        return Job(lambda i: x[i].to(dtype).div_(_RANKS))

    return made


def _cast_with_feedback(n: int, sets: int) -> Job:
    x, e = _normal(n, sets), _normal(n, sets, 0.1)

    def run(i: int) -> object:
        v = x[i] + e[i]
        half = v.to(torch.float16)
        torch.sub(v, half, out=e[i])
        return half

    return Job(run)


def _add_half(n: int, sets: int) -> Job:
    y, half = _normal(n, sets), [each.half() for each in _normal(n, sets)]
    return Job(lambda i: y[i].add_(half[i]))


def _ring_round(n: int, sets: int) -> Job:
    y, half = _normal(n, sets), [each.half() for each in _normal(n, sets)]
    return Job(lambda i: y[i].add_(half[i]).to(torch.float16))


def _int8(n: int, sets: int) -> Job:
    x, e = _normal(n, sets), _normal(n, sets, 0.1)

    def run(i: int) -> object:
        v = (x[i] + e[i]).view(-1, BLOCK)
        scale = v.abs().amax(1, keepdim=True) / 127
        sent = (v / scale).round_().to(torch.int8)
        torch.sub(v, sent * scale, out=e[i].view(-1, BLOCK))
        return sent

    return Job(run)


def _int8_add(n: int, sets: int) -> Job:
    y = _normal(n, sets)
    sent = [torch.randint(-127, 128, (n,), device=DEVICE).to(torch.int8) for _ in range(sets)]
    scale = torch.rand(n // BLOCK, 1, device=DEVICE)
    return Job(lambda i: y[i].view(-1, BLOCK).add_(sent[i].view(-1, BLOCK) * scale))


class _Bits:
    """Eight signs a byte."""

    def __init__(self) -> None:
        self._weights = torch.tensor([1 << i for i in range(8)], device=DEVICE, dtype=torch.uint8)

    def pack(self, negative: torch.Tensor) -> torch.Tensor:
        bits = negative.view(-1, 8).to(torch.uint8)
        return (bits * self._weights).sum(1, dtype=torch.uint8)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return (packed.unsqueeze(1) & self._weights).ne(0).view(-1, BLOCK)


def _send_signs(bits: _Bits, v: torch.Tensor, e: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Packs the signs of v, with a mean for each half of each block; e is what they lose."""
    blocks = v.view(-1, block)
    negative = blocks < 0
    below = negative.sum(1, keepdim=True)
    total = (blocks * negative).sum(1, keepdim=True)
    low = total / below
    high = (blocks.sum(1, keepdim=True) - total) / (block - below)
    torch.sub(blocks, torch.where(negative, low, high), out=e.view(-1, block))
    return bits.pack(negative)


def _onebit(block: int) -> Callable[[int, int], Job]:
    def made(n: int, sets: int) -> Job:
        x, e, bits = _normal(n, sets), _normal(n, sets, 0.1), _Bits()
        return Job(lambda i: _send_signs(bits, x[i] + e[i], e[i], block))

    return made


class _Payloads:
    """Packed signs and means of several ranks."""

    def __init__(self, n: int, sets: int, bits: _Bits, count: int = PAYLOADS) -> None:
        self._bits = bits
        self._packed = [
            [torch.randint(256, (n // 8,), device=DEVICE).to(torch.uint8) for _ in range(count)]
            for _ in range(sets)
        ]
        self._means = torch.randn(2, n // BLOCK, 1, device=DEVICE)

    def sum_into(self, i: int, y: torch.Tensor) -> None:
        y.zero_()
        self.add_to(i, y)

    def add_to(self, i: int, y: torch.Tensor) -> None:
        low, high = self._means
        for packed in self._packed[i]:
            y.view(-1, BLOCK).add_(torch.where(self._bits.unpack(packed), low, high))


def _onebit_add(n: int, sets: int) -> Job:
    y = _normal(n, sets)
    payload = _Payloads(n, sets, _Bits(), count=1)
    return Job(lambda i: payload.add_to(i, y[i]))


def _onebit_sum(n: int, sets: int) -> Job:
    y = _normal(n, sets)
    payloads = _Payloads(n, sets, _Bits())
    return Job(lambda i: payloads.sum_into(i, y[i]))


def _onebit_owner(n: int, sets: int) -> Job:
    y, e, bits = _normal(n, sets), _normal(n, sets, 0.1), _Bits()
    payloads = _Payloads(n, sets, bits)

    def run(i: int) -> object:
        payloads.sum_into(i, y[i])
        return _send_signs(bits, y[i] + e[i], e[i])

    return Job(run)


def _threshold(n: int, sets: int) -> Job:
    x, e = _normal(n, sets), _normal(n, sets, 0.1)

    def run(i: int) -> object:
        v = x[i] + e[i]
        (index,) = (v.abs() >= _TAU).nonzero(as_tuple=True)
        sign = v[index].sign()
        v.index_add_(0, index, sign, alpha=-_TAU)
        e[i].copy_(v)
        return index, sign

    return Job(run, waits=True)


def _topk(n: int, sets: int) -> Job:
    x, e = _normal(n, sets), _normal(n, sets, 0.1)
    count = max(1, int(n * DENSITY))

    def run(i: int) -> object:
        v = x[i] + e[i]
        _, index = torch.topk(v.abs(), count, sorted=False)
        sent = v[index]
        v.index_fill_(0, index, 0)
        e[i].copy_(v)
        return index, sent

    return Job(run)


def _scatter(n: int, sets: int) -> Job:
    y, count = _normal(n, sets), max(1, int(n * DENSITY))
    index = [torch.randint(n, (count,), device=DEVICE) for _ in range(sets)]
    sent = torch.randn(count, device=DEVICE)
    return Job(lambda i: y[i].zero_().index_put_((index[i],), sent))


def _power_sgd(n: int, sets: int) -> Job:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    rows = 1
    while rows * rows * 4 <= n:
        rows *= 2
    shape = (rows, n // rows)
    x, e = _normal(n, sets), _normal(n, sets, 0.1)
    q = torch.randn(shape[1], _RANK, device=DEVICE)

    def run(i: int) -> object:
        v = (x[i] + e[i]).view(shape)
        p = v @ q
        powerSGD_hook._orthogonalize(p.unsqueeze(0))
        own = v.t() @ p
        sent = p @ own.t()
        torch.sub(v, sent, out=e[i].view(shape))
        return sent

    return Job(run, waits=True)


_JOBS: dict[str, Callable[[int, int], Job]] = {
    "fold": _fold,
    "fp16 encode": _cast(torch.float16),
    "fp16 encode, feedback": _cast_with_feedback,
    "fp16 decode-add": _add_half,
    "fp16 ring round": _ring_round,
    "bf16 encode": _cast(torch.bfloat16),
    "int8 encode, feedback": _int8,
    "int8 decode-add": _int8_add,
    "onebit encode, feedback": _onebit(BLOCK),
    f"onebit encode, feedback, blocks of {LARGE_BLOCK}": _onebit(LARGE_BLOCK),
    "onebit decode-add": _onebit_add,
    "onebit sum of 8": _onebit_sum,
    "onebit owner's stage of 8": _onebit_owner,
    "threshold encode, feedback": _threshold,
    "threshold decode": _scatter,
    "topk encode, feedback": _topk,
    "topk decode": _scatter,
    "lowrank, rank 4": _power_sgd,
}
