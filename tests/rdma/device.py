"""What the tests over RDMA have in common: where they run, and ranks that meet as users' do."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire import Communicator
from hosts import Rank

TRANSPORT = os.environ.get("RDMA_TEST_TRANSPORT", "rdma")
PATIENCE = 60.0  # seconds; under emulation Python is slow
MACHINES = int(os.environ.get("RDMA_VM_SIZE", "0"))

CLASS = Path("/sys/class/infiniband")
_HAS_DEVICE = CLASS.is_dir() and any(CLASS.iterdir())
_REMEDY = "`make test-with WHAT=rdma` brings one"
on_a_device = pytest.mark.skipif(
    not _HAS_DEVICE or MACHINES > 1, reason=f"no RDMA device, or several machines: {_REMEDY}"
)
on_two_machines = pytest.mark.skipif(
    MACHINES != 2, reason="not one of two virtual machines: `make test-with WHAT=rdma` makes them"
)

Body = Callable[[Communicator], Any]


@contextlib.contextmanager
def started(
    bodies: Mapping[int, Body], size: int, store: str, **options: Any
) -> Iterator[dict[int, Rank]]:
    """These ranks of so many, each in a process that runs its body; killed at the end."""

    def run(rank: int, body: Body) -> Any:
        secret = "0123456789abcdef"
        with gradwire.init(
            rank=rank, ranks=size, store=store, secret=secret, timeout=PATIENCE, **options
        ) as comm:
            return body(comm)

    with contextlib.ExitStack() as stack:
        ranks = {}
        for rank, body in bodies.items():
            ranks[rank] = Rank(None, lambda pipe, rank=rank, body=body: run(rank, body))
            stack.callback(ranks[rank].close)
        yield ranks


def local_store() -> str:
    """Where ranks of this machine can meet: at a port that was free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"
