"""Runs a function on ranks of torch that are processes on several hosts (network namespaces)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import namespaces
import torch
import torch.distributed as dist
from hosts import PORT, Network
from torch_ranks import LIMIT, _context


def run(
    network: Network,
    places: Sequence[int],
    body: Callable[[], Any],
    *,
    backend: str,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """What `body()` returns on each rank; rank r is on host places[r], and meets at host 0.

    `body` is a function of a module, and its result can be pickled. The ranks have the environment
    of the first test that started some, and what `environment` adds.
    """
    found, children = [], []
    for rank, place in enumerate(places):
        ours, theirs = _context.Pipe(duplex=False)
        own = dict(environment or {})
        what = (network.hosts[place].path, rank, len(places), theirs, body, backend, own)
        child = _context.Process(target=_child, args=what)
        child.start()
        theirs.close()
        children.append((child, ours))
    try:
        for _, pipe in children:
            assert pipe.poll(LIMIT)
            found.append(pipe.recv())
    finally:
        for child, pipe in children:
            child.kill()
            child.join()
            pipe.close()
    return found


def _child(
    namespace: str,
    rank: int,
    ranks: int,
    pipe: Connection,
    body: Callable[[], Any],
    backend: str,
    environment: dict[str, str],
) -> None:
    namespaces.enter(namespace)
    os.environ.update(MASTER_ADDR="10.77.0.1", MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="eth0")
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    pipe.send(body())
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads end with the process
