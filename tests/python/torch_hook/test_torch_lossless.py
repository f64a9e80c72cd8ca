"""The hook with the codec lossless: the bits of none, in fewer bytes."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch_ranks
from gradwire.torch import register
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch_training import SMALL_BUCKETS, batch, mlp, with_each

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXACT = ("none", "lossless")


def trained(codec: str, dtype: str) -> tuple[str, int]:
    """A digest of the parameters after some steps of AdamW, and the bytes that this rank sent."""
    ddp = DistributedDataParallel(mlp().to(DTYPES[dtype]), **SMALL_BUCKETS)
    state = register(ddp, codec)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    for step in range(4):
        optimizer.zero_grad()
        x, y = (each.to(DTYPES[dtype]) for each in batch(step))
        mse_loss(ddp(x), y).backward()
        optimizer.step()
    assert state.feedback is None
    found = hashlib.sha256()
    for each in ddp.parameters():
        found.update(each.detach().view(torch.uint8).numpy().tobytes())
    return found.hexdigest(), state.communicator.traffic.bytes_sent


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.95), ("bfloat16", 0.85)])
def test_a_training_has_the_bits_of_none(
    monkeypatch: pytest.MonkeyPatch, dtype: str, most: float
) -> None:
    monkeypatch.setenv("GRADWIRE_TRANSPORT", "tcp")
    for found in torch_ranks.run(2, with_each, EXACT, trained, dtype):
        (plain, plain_bytes), (packed, packed_bytes) = (found[each] for each in EXACT)
        assert plain == packed
        assert packed_bytes < most * plain_bytes
