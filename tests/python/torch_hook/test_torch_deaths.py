"""A rank that is killed while register() meets: all others name it, at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import gradwire.torch
import torch
import torch_ranks
from gradwire import TransportError
from gradwire._bootstrap import connect, rendezvous_exchange
from stopwatch import own_time
from torch.nn.parallel import DistributedDataParallel

SOON = 2.0  # seconds
STAGES: dict[str, tuple[type, str]] = {
    "before it sends its address": (rendezvous_exchange.RendezvousExchange, "exchange_addresses"),
    "when it connects": (connect._Attempt, "_connect"),
    "while it awaits others": (connect._Attempt, "_await_higher"),
}


def register(victim: int, stage: str, died: Path) -> tuple[float, int]:
    """The time at which this rank learned of a death, and the peer."""

    def die(*_: Any, **__: Any) -> None:
        died.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
    if torch.distributed.get_rank() == victim:
        setattr(*STAGES[stage], die)
    with pytest.raises(TransportError, match=f"rank {victim}") as raised:
        gradwire.torch.register(ddp)
    return own_time(), raised.value.peer


@pytest.mark.parametrize(
    ("victim", "stage"),
    [(2, "before it sends its address"), (2, "when it connects"), (0, "while it awaits others")],
)
def test_all_others_name_a_rank_that_is_killed_while_they_register(
    victim: int, stage: str, tmp_path: Path
) -> None:
    died = tmp_path / "died"
    found = torch_ranks.run(3, register, victim, stage, died, dying=(victim,))
    death = float(died.read_text())
    for when, peer in filter(None, found):
        assert peer == victim
        assert when - death < SOON
