"""Cases of a fault in training over the backend, and what must come of it.

Every rank that survives must raise an error that names the faulty one, whether they have a group in
common or not; where nothing fails, none may.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
import torch_faults
import torch_meshes
import torch_ranks
from torch_faults import FAULTS, HARMLESS, Found

_RANKS = 4
_STEPS = 6
_TIMEOUT = 8.0  # seconds, of calls
# In which a fault must be known to all beyond the time that its kind takes; of a machine that does
# nothing else most take less than 0.2.
_GRACE = 20.0


class Case(NamedTuple):
    """A fault, in one step of training."""

    work: torch_meshes.Work
    fault: Callable[[], None]
    faulty: int
    step: int
    moment: str

    def __str__(self) -> str:
        at = f"{self.moment} of step {self.step}"
        return f"{self.work.__name__}: rank {self.faulty}, {self.fault.__name__} at {at}"


def make_case(seed: int, number: int) -> Case:
    """Draws a case; the same one for the same numbers."""
    dice = random.Random(f"{seed}/{number}")
    return Case(
        dice.choice(torch_meshes.WORKS),
        dice.choice([*FAULTS, *HARMLESS]),
        dice.randrange(_RANKS),
        dice.randrange(1, _STEPS),
        dice.choice(torch_meshes.MOMENTS),
    )


def outcomes(case: Case) -> list[Found | None]:
    """What each rank raised; None for those that died or raised nothing."""
    dying = (case.faulty,) if case.fault in FAULTS else ()
    ended = torch_ranks.run(_RANKS, _train, case, dying=dying, backend="gradwire")
    return [each[0] if each is not None else None for each in ended]


def problems(case: Case, found: list[Found | None]) -> list[str]:
    """What is wrong with the outcomes."""
    if case.fault not in FAULTS:
        return [f"rank {rank} raised {each}" for rank, each in enumerate(found) if each is not None]
    wrong = []
    for rank, each in enumerate(found):
        if rank == case.faulty:
            continue
        if each is None:
            wrong.append(f"rank {rank} raised nothing")
        elif each.kind not in FAULTS[case.fault] or each.job_peer != case.faulty:
            wrong.append(f"rank {rank} raised {each}")
        elif each.seconds > _TIMEOUT + _GRACE:
            wrong.append(f"rank {rank} raised {each.kind} late, after {each.seconds:.1f} s")
    return wrong


def _train(case: Case) -> tuple[Found | None]:
    now = 0

    def moment(name: str) -> None:
        if (dist.get_rank(), now, name) == (case.faulty, case.step, case.moment) and not done:
            done.append(name)
            torch_faults.commit(case.fault)

    done: list[str] = []
    step = case.work(moment, _TIMEOUT)

    def steps() -> None:
        nonlocal now
        for now in range(_STEPS + 1):  # noqa: B007
            step()

    found = torch_faults.error_of(steps)
    torch_faults.wait_for_all(_RANKS - 1 if case.fault in FAULTS else _RANKS)
    return (found,)
