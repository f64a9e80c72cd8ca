"""Failures on a 2-D mesh: every rank names the one at fault, with a group in common or without."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_faults
import torch_meshes
import torch_ranks
from torch_cases import Case, make_case, outcomes, problems
from torch_versions import HYBRID_SHARDS, has_hybrid_shards

SEED = 20261168
FAULTY = 3  # shares neither row nor column with rank 0


@pytest.mark.parametrize(
    "fault", [torch_faults.kill, torch_faults.leave, torch_faults.fail, torch_faults.stop]
)
def test_all_ranks_of_a_mesh_name_the_one_at_fault(fault: Callable[[], None]) -> None:
    case = Case(torch_meshes.rows_and_columns, fault, FAULTY, step=3, moment="start")
    found = outcomes(case)
    assert not problems(case, found)
    far = found[0]
    assert far is not None
    assert far.peer == -1  # rank 3 is not in its groups
    assert "3 of the job" in far.text or "another group failed" in far.text


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(torch_meshes.hybrid_shards, marks=has_hybrid_shards),
        torch_meshes.tensor_and_data_parallel,
    ],
)
@pytest.mark.parametrize("fault", [torch_faults.kill, torch_faults.stop])
def test_training_on_a_mesh_names_the_one_at_fault(
    work: torch_meshes.Work, fault: Callable[[], None]
) -> None:
    case = Case(work, fault, FAULTY, step=2, moment="backward")
    assert not problems(case, outcomes(case))


def test_a_failure_in_a_hook_ends_the_groups_too() -> None:
    case = Case(torch_meshes.rows_and_hooks, torch_faults.kill, FAULTY, step=2, moment="backward")
    assert not problems(case, outcomes(case))


@pytest.mark.parametrize(
    "number", [*range(3), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(3, 40))]
)
def test_random_faults_in_training(number: int) -> None:
    """A slice of `python -m tests.faults.training`, which draws new cases."""
    case = make_case(SEED, number)
    if case.work is torch_meshes.hybrid_shards and not HYBRID_SHARDS:
        pytest.skip("this torch's FSDP2 cannot replicate shards on the CPU")
    assert not problems(case, outcomes(case)), case


def wait_for_a_slow_rank(blocks: bool) -> str:
    """What rank 0 is told of rank 1, which has posted a receive from rank 2 in another group.

    Rank 1 either is blocked until its message comes, or has been for a moment, and is slow.
    """
    store = dist.distributed_c10d._get_default_store()
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=0.7))
    if dist.get_rank() == 2:
        store.wait(["over"])
        return ""
    if dist.get_rank() == 1:
        receive = dist.irecv(torch.ones(3), 2)
        store.set("posted", "")
        if not blocks:
            with pytest.raises(gradwire.Timeout):
                receive.wait(timedelta(milliseconds=1))
            store.wait(["over"])
        with pytest.raises(gradwire.Timeout):
            receive.wait()
        return ""
    store.wait(["posted"])
    with pytest.raises(gradwire.Timeout) as raised:
        dist.all_reduce(torch.ones(3), group=pair)
    store.set("over", "")
    return str(raised.value)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_posted_receive_is_no_wait(blocks: bool) -> None:
    told = torch_ranks.run(3, wait_for_a_slow_rank, blocks, backend="gradwire")[0]
    assert ("rank 2 of the job" in told) == blocks, told
