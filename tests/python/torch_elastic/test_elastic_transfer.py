"""A state's way to ranks that do not have it: every bit, in fewer bytes over sockets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire import Communicator
from gradwire.torch.elastic.transfer import share
from ranks import on_ranks


def state(dtype: torch.dtype) -> dict[str, Any]:
    """What an AdamW of a small model has, and tensors of other types."""
    random = torch.Generator().manual_seed(0)  # ranks are threads
    model = torch.nn.Linear(300, 101, dtype=dtype)
    for each in model.parameters():
        each.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 300, generator=random).to(dtype)).square().sum().backward()
        optimizer.step()
    others = {"step": torch.tensor(3), "mask": torch.arange(77) % 3 == 0, "nothing": torch.empty(0)}
    odd = torch.tensor([0x7FC00001, -0x80000000, 1], dtype=torch.int64).to(torch.int32)
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("holders", [[1], [0, 1], [0, 2]])
@on_ranks(3, transport="tcp")
def test_receivers_get_every_bit_in_fewer_bytes(
    comm: Communicator, holders: list[int], dtype: torch.dtype
) -> None:
    receivers = [rank for rank in range(3) if rank not in holders]
    own = state(dtype) if comm.rank in holders else None
    before = comm.traffic.bytes_sent
    got = share(comm, holders, receivers, own, lambda _: None)
    comm.barrier()
    used = comm.all_gather_object(comm.traffic.bytes_sent - before)
    expected = raw(state(dtype))
    assert raw(got) == expected
    plain = sum(map(len, expected)) * len(receivers)
    assert sum(used) < (0.9 if dtype is torch.float32 else 0.8) * plain + 20_000
