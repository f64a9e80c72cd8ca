"""Works of an operation that another rank has not begun: they wait no longer than they are told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from ranks import LIMIT
from torch_pool import on_ranks
from torch_versions import forwards_all

SOON = timedelta(seconds=0.05)


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def begun(group: Any, x: torch.Tensor) -> Any:
    return dist.all_reduce(x, group=group, async_op=True)


@forwards_all
@on_ranks
def test_an_operation_is_complete_once_all_ranks_have_come() -> None:
    """The last rank comes only when all others have found the operation unfinished."""
    group, x = dist.new_group(), torch.ones(1000)[::2]
    work = None if is_last() else begun(group, x)
    if work is not None:
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        assert not work.get_future().done()
    dist.barrier()
    work = work or begun(group, x)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0].tolist() == [dist.get_world_size()] * 500


@on_ranks
def test_who_waits_in_vain_may_wait_again() -> None:
    group, x = dist.new_group(timeout=timedelta(seconds=LIMIT)), torch.ones(3)
    work = None if is_last() else begun(group, x)
    if work is not None:
        for _ in range(2):
            with pytest.raises(gradwire.Timeout):
                work.wait(SOON)
        assert not work.is_completed()
    dist.barrier()
    work = work or begun(group, x)
    work.wait(timedelta(seconds=LIMIT))
    assert x.tolist() == [dist.get_world_size()] * 3


@forwards_all
@torch_ranks.on_ranks(2, backend="gradwire")
def test_a_failed_operation_is_over_without_success() -> None:
    store, group = dist.distributed_c10d._get_default_store(), dist.new_group()
    if is_last():
        store.wait(["over"])
        return
    group.set_timeout(timedelta(seconds=0.5))
    work = begun(group, torch.ones(3))
    with pytest.raises(gradwire.Timeout):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), gradwire.Timeout)
    store.set("over", b"")
