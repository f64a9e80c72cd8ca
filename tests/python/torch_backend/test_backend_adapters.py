"""The class for torch 2.14 and later, over a base class as theirs, which 2.13 cannot construct."""

from __future__ import annotations

from datetime import timedelta

import gradwire
import pytest
import torch
from gradwire import Communicator
from gradwire.torch import Options
from gradwire.torch.backend import adapters
from torch.distributed import ReduceOp


class Base:
    """The constructor of torch's Backend, with which 2.14 begins."""

    def __init__(self, rank: int, size: int) -> None:
        self.given = rank, size


def use(comm: Communicator) -> None:
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
    group.set_timeout(timedelta(seconds=20))
    group.shutdown()
    with pytest.raises(gradwire.Aborted):
        group.barrier()


def test_a_backend_of_later_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    monkeypatch.setattr(torch._C._distributed_c10d, "Backend", Base)
    gradwire.spawn(use, 2)
