"""The store of torchrun's agent, in a process of its own: its threads must not be forked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection

from hosts import Rank


@contextlib.contextmanager
def agents_store() -> Iterator[int]:
    """The port of the agent's store on loopback."""
    with agent() as (_, port):
        yield port


@contextlib.contextmanager
def agent() -> Iterator[tuple[int, int]]:
    """The process that serves the agent's store, and its port."""
    process = Rank(None, _serve)
    try:
        yield process.pid, process.pipe.recv()
    finally:
        process.close()


def rank_of_agent(rank: int, port: int) -> dict[str, str]:
    """The variables that torchrun gives to one of two ranks."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "run",
    }


def _serve(pipe: Connection) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()  # until this process is killed
