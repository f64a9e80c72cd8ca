"""A GradScaler with the optimizers that exchange: all ranks have its scale, and skip alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire import Communicator, InvalidArgument
from gradwire.torch import OneBitAdam
from local_training import batch, bits
from ranks import on_ranks, run
from replicated_training import Replica
from torch.nn.functional import mse_loss


def scaled(replica: Replica, scaler: Any, *, unscales: bool = False, wrong: bool = False) -> None:
    """One step with a scaled loss, Inf on rank 1 if it is to be `wrong`."""
    x, y = batch(replica.step_number, replica.comm.rank)
    replica.step_number += 1
    replica.optimizer.zero_grad()
    factor = float("inf") if wrong and replica.comm.rank == 1 else 1.0
    scaler.scale(mse_loss(replica.model(x), y) * factor).backward()
    if unscales:
        scaler.unscale_(replica.optimizer)
    scaler.step(replica.optimizer)
    scaler.update()


@pytest.mark.parametrize("unscales", [False, True])
def test_scales_agree_and_training_has_the_bits_of_one_without_a_scaler(
    unscales: bool,
) -> None:
    """Scales are powers of 2, so that they round nothing."""

    def with_scaler(comm: Communicator) -> tuple[bytes, float, int]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        replica = Replica(comm, scaler=scaler)
        for step in range(8):
            scaled(replica, scaler, unscales=unscales, wrong=step in (1, 5))
        assert replica.optimizer.skipped_steps == 2
        return bits(replica.model), scaler.get_scale(), replica.optimizer.steps

    def without(comm: Communicator) -> bytes:
        replica = Replica(comm)
        for step in range(8):
            replica.step_number = step
            if step not in (1, 5):
                replica.train(1)
        return bits(replica.model)

    expected = run(2, without)[0]
    assert run(2, with_scaler) == [(expected, 2.0**8, 6)] * 2


@on_ranks(2)
def test_a_scaler_that_the_optimizer_was_not_given_is_refused(comm: Communicator) -> None:
    scaler = torch.amp.GradScaler("cpu")
    replica = Replica(comm)
    with pytest.raises(InvalidArgument) as raised:
        scaled(replica, scaler)
    replica.optimizer.scaler = again = torch.amp.GradScaler("cpu")
    scaled(replica, again)
    assert replica.optimizer.steps == 1
    off = torch.amp.GradScaler("cpu", enabled=False)
    replica.optimizer.scaler = None
    scaled(replica, off)
    assert "give scaler=" in str(raised.value)


def test_autocast_and_accumulation() -> None:
    """Two backwards before a step are one of twice the batch."""

    def body(comm: Communicator, parts: int) -> bytes:
        replica = Replica(comm, OneBitAdam, codec="none", warm_up_codec="none")
        for step in range(4):
            x, y = batch(step, comm.rank)
            for some in zip(x.chunk(parts), y.chunk(parts), strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    out = replica.model(some[0])
                (mse_loss(out.float(), some[1]) / parts).backward()
            replica.optimizer.step()
            replica.optimizer.zero_grad()
        return bits(replica.model)

    whole, parts = (run(2, body, count)[0] for count in (1, 2))
    one, other = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (whole, parts))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-2)
