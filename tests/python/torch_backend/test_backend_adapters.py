"""The class for torch 2.14 and later, over a base class as theirs, which 2.13 cannot construct."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
from gradwire import Communicator
from gradwire.torch import Options
from gradwire.torch.backend import adapters
from ranks import LIMIT
from torch.distributed import ReduceOp


class Base:
    """The constructor of torch's Backend, with which 2.14 begins."""

    def __init__(self, rank: int, size: int) -> None:
        self.given = rank, size


def use(comm: Communicator, store: str) -> None:
    group = adapters.make(comm, Options(), None)
    assert isinstance(group, Base)
    assert group.given == (comm.rank, 2)
    assert group.getBackendName() == "gradwire"
    x = torch.ones(3)
    group.allreduce([x], ReduceOp.SUM).wait()
    assert x.tolist() == [2.0] * 3
    sparse = torch.eye(2).to_sparse()
    group.allreduce_sparse([sparse]).wait()
    assert torch.equal(sparse.to_dense(), 2 * torch.eye(2))
    group.start_coalescing()
    group.allreduce([x])
    group.broadcast([y := torch.tensor([float(comm.rank)])], 1)
    group.end_coalescing().wait()
    assert (x.tolist(), y.tolist()) == ([4.0] * 3, [1.0])
    split(group, comm.rank, store)
    group.monitored_barrier()
    group.set_timeout(timedelta(seconds=20))
    group.shutdown()
    with pytest.raises(gradwire.Aborted):
        group.barrier()


def split(group: Any, rank: int, store: str) -> None:
    options = SimpleNamespace(_timeout=timedelta(seconds=LIMIT))
    turned = group.split(dist.FileStore(store, 2), [1, 0], options)
    assert turned.given == (1 - rank, 2)
    turned.broadcast([x := torch.tensor([rank])], 0).wait()
    assert x.tolist() == [1]
    turned.shutdown()
    if rank == 1:
        with pytest.raises(gradwire.InvalidArgument, match="rank 1 is in none of split_ranks"):
            group.split(dist.FileStore(store, 2), [0], options)


def test_a_backend_of_later_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    monkeypatch.setattr(torch._C._distributed_c10d, "Backend", Base)
    gradwire.spawn(use, 2, args=(f"{tmp_path}/store",))
