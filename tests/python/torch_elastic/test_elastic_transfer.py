"""A state's way to ranks that do not have it: every bit, in fewer bytes over slow links."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire import Communicator, CostModel
from gradwire.torch.elastic import transfer
from gradwire.torch.elastic.transfer import share
from gradwire.torch.exchange import links
from ranks import on_ranks

from bench.planning.choices import SimulatedRanks


def state(dtype: torch.dtype) -> dict[str, Any]:
    """What AdamW of a small model may have, and tensors of other types."""
    random = torch.Generator().manual_seed(0)  # ranks are threads
    weights, average = (torch.randn(300, 101, generator=random) for _ in range(2))
    moments = {"exp_avg": 1e-3 * average, "exp_avg_sq": 1e-7 * average.square()}
    others = {"step": torch.tensor(3), "mask": torch.arange(77) % 3 == 0, "nothing": torch.empty(0)}
    odd = torch.tensor([0x7FC00001, -0x80000000, 1], dtype=torch.int64).to(torch.int32)
    return {
        "model": {"weight": weights.to(dtype)},
        "optimizer": {name: each.to(dtype) for name, each in moments.items()},
        "others": [others, odd.view(torch.float32), torch.arange(5, dtype=torch.float64)],
    }


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [found for each in parts for found in tensors(each)] if isinstance(
        value, dict | list | tuple
    ) else []  # fmt: skip


def raw(value: Any) -> list[bytes]:
    found = tensors(value)
    flat = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in found)
    return [each.numpy().tobytes() for each in flat]


RATES = {"slow": 1e9, "fast": 1e10}  # bit/s


@pytest.fixture(params=RATES)
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Links that are measured at a rate, and states that are worth a measurement."""
    monkeypatch.setattr(transfer, "_rate", lambda _: RATES[request.param])
    monkeypatch.setattr(transfer, "_LONG", 1)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("holders", [[1], [0, 1], [0, 2]])
@on_ranks(3, transport="tcp")
def test_receivers_get_every_bit_in_fewer_bytes_where_links_are_slow(
    comm: Communicator, holders: list[int], dtype: torch.dtype, link: str
) -> None:
    receivers = [rank for rank in range(3) if rank not in holders]
    own = state(dtype) if comm.rank in holders else None
    before = comm.traffic.bytes_sent
    got = share(comm, holders, receivers, own, lambda _: None)
    comm.barrier()
    used = sum(comm.all_gather_object(comm.traffic.bytes_sent - before))
    expected = raw(state(dtype))
    assert raw(got) == expected
    plain = sum(map(len, expected)) * len(receivers)
    packed = (0.9 if dtype is torch.float32 else 0.8) * plain + 20_000
    assert used < packed if link == "slow" else used >= plain > packed


@pytest.mark.parametrize(
    ("rate", "hosts", "holders", "sites", "mib", "codec"),
    [
        (1e9, [[0, 1], [2, 3]], 2, 1, 100, "lossless"),
        (1e9, [[0, 1], [2, 3]], 2, 1, 1, "none"),
        (4e9, [[0, 1], [2, 3]], 2, 1, 100, "none"),
        (2e9, [[0, 1], [2, 3]], 2, 1, 100, "lossless"),  # of which two ranks have a half each
        (2e9, [[0, 1], [2, 3]], 1, 1, 100, "none"),  # a broadcast, which hosts get once
        (2e9, [[0], [1], [2], [3]], 3, 1, 100, "none"),
        (4e9, [[0, 1], [2, 3]], 2, 2, 100, "lossless"),
        (1e9, [[0, 1]], 1, 1, 100, "lossless"),
        (0, [[0, 1]], 1, 1, 100, "none"),
    ],
)
def test_the_codec_follows_a_ranks_part_of_links_and_the_size(
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    hosts: Any,
    holders: int,
    sites: int,
    mib: int,
    codec: str,
) -> None:
    link = "between" if len(hosts) > 1 else "within"
    costs = {f"{link}.beta": 8 / rate, f"{link}.latency": 1e-4} if rate else {}
    ranks: Any = SimulatedRanks(CostModel(costs), hosts)
    ranks.sites = hosts[:sites]
    monkeypatch.setattr(transfer, "measured", lambda its: links.measured(its, its.clock))
    everyone = [rank for host in hosts for rank in host]
    sharing = transfer._sharing(ranks, everyone[:holders], everyone[holders:])
    assert transfer._codec(ranks, mib << 20, sharing) == codec
