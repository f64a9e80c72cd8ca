"""Handlers of other libraries' errors look for the words "timed out": every Timeout has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import Communicator, Timeout, TransportError
from ranks import outcomes

LATE = 0.2  # seconds

CALLS: dict[str, Any] = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(4), timeout=LATE),
    "barrier": lambda comm: comm.barrier(timeout=LATE),
    "recv": lambda comm: comm.recv(np.ones(4), 1, timeout=LATE),
    "recv from any": lambda comm: comm.recv(np.ones(4), timeout=LATE),
    "wait": lambda comm: comm.all_reduce(np.ones(4), async_op=True).wait(timeout=LATE),
    "broadcast_object": lambda comm: comm.broadcast_object(root=1, timeout=LATE),
}


@pytest.mark.parametrize("name", CALLS)
def test_who_waits_in_vain_is_told_that_it_timed_out(name: str) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            with pytest.raises((Timeout, TransportError, gradwire.Aborted)):
                comm.recv(np.ones(5), 0)  # which nobody sends
            return
        with pytest.raises(Timeout, match="timed out"):
            CALLS[name](comm)
        comm.abort()

    for each in outcomes(2, body):
        assert each.error is None


def test_every_timeout_of_the_core_says_so() -> None:
    sources = Path(__file__).parents[3] / "csrc"
    texts = [
        (path.name, thrown)
        for path in sources.rglob("*.cc")
        for thrown in re.findall(r"throw Timeout\((.*?)\);", path.read_text(), re.S)
    ]
    assert len(texts) > 5
    built = {  # before they are thrown
        "gpu_fault_monitor.cc": "what",
        "nccl_comm.cc": "text.str()",
        "channel.cc": "named(error)",
    }
    for name, thrown in texts:
        assert "timed out" in thrown or thrown.startswith(built.get(name, "-")), (name, thrown)
