"""The campaign at CI's size, and that its judge would say so if something were wrong."""

from __future__ import annotations

import dataclasses
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from gradwire import _core
from gradwire._arrays.operands import REDUCIBLE

from tests.faults.calls import REDUCING
from tests.faults.cases import _DISAGREEMENTS, _LOSSY, KINDS, Case, make_case
from tests.faults.judge import problems
from tests.faults.ranks import Outcome, Resources
from tests.faults.supervisor import Finished

CASES = 30
ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_no_hang_no_wrong_result_no_leak() -> None:
    """One seed, so that a change is judged by what it did; `make faults` draws new ones."""
    seed = os.environ.get("FAULTS_SEED") or "20261121"
    command = [sys.executable, "-m", "tests.faults", "--count", str(CASES), "--seed", seed]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


def test_a_seed_makes_the_same_cases_again() -> None:
    assert [make_case(3, n) for n in range(50)] == [make_case(3, n) for n in range(50)]
    assert make_case(3, 0) != make_case(4, 0)


def case(kind: str, goes_on: bool) -> Case:
    """Four ranks on one communicator; rank 1 is faulty, and rank 2 at the link's other end."""
    made = make_case(0, 0, kind)
    fault = dataclasses.replace(made.fault, kind=kind, faulty=1, peer=2, call=0)
    calls = tuple(dataclasses.replace(each, communicator=0) for each in made.calls[:3])
    return dataclasses.replace(made, ranks=4, splits=(), calls=calls, fault=fault, goes_on=goes_on)


def found(
    kind: str,
    *others: Outcome,
    faulty: Outcome | None = None,
    goes_on: bool = False,
    queued: dict[int, dict[int, float]] | None = None,
) -> list[str]:
    """The judge's findings on ranks 0, 2 and 3; one that is left out hangs."""
    told = (*others, Outcome(1, died=-9) if faulty is None else faulty)
    entered = dict.fromkeys(range(4), 0)
    finished = Finished(
        {each.rank: each for each in told}, entered, fired_at=100.0, queued=queued or {}
    )
    return problems(case(kind, goes_on), finished)


def all_raise(error: str, peer: int = -1, at: float = 100.5) -> list[Outcome]:
    return [Outcome(rank, error, peer, "", at) for rank in (0, 2, 3)]


def test_the_judge_accepts_what_is_right() -> None:
    assert found("kill", *all_raise("TransportError", 1)) == []
    assert found("stop", *all_raise("Timeout", 1), faulty=Outcome(1)) == []
    assert found("none", *map(Outcome, (0, 2, 3)), faulty=Outcome(1)) == []


def test_the_judge_sees_a_hang() -> None:
    assert "rank 3 hangs in call 0" in found("kill", *all_raise("TransportError", 1)[:2])


@pytest.mark.parametrize(
    "wrong",
    [
        Outcome(0),
        Outcome(0, died=-11),
        Outcome(0, "Timeout", 1, at=100.5),
        Outcome(0, "TransportError", 2, at=100.5),
        Outcome(0, "TransportError", 1, at=120.0),
        Outcome(0, "TransportError", 1, at=100.5, leaks=["descriptor 9: socket"]),
        Outcome(0, "TransportError", 1, at=100.5, wrong=[(0, 1)]),
    ],
    ids=["silent", "crash", "type", "name", "late", "leak", "result"],
)
def test_the_judge_sees_one_rank_that_is_wrong(wrong: Outcome) -> None:
    assert len(found("kill", wrong, *all_raise("TransportError", 1)[1:])) == 1


@pytest.mark.parametrize(("seconds", "problems"), [(18.0, 0), (1.0, 1)])
@pytest.mark.parametrize("rank", [0, 2])  # the late one, or one that had to tell it
def test_the_judge_counts_no_time_in_which_a_rank_was_queued(
    rank: int, seconds: float, problems: int
) -> None:
    """Nothing is known of threads that have ended meanwhile."""
    raised = all_raise("TransportError", 1)
    raised[0].at = 120.0
    queued = next(each for each in raised if each.rank == rank)
    queued.queued = {10: 7.0 + seconds - 0.5, 12: 0.5}
    assert len(found("kill", *raised, queued={rank: {10: 7.0, 11: 30.0}})) == problems


def test_the_judge_wants_to_know_who_passed_what() -> None:
    told = "ranks disagree in call 0: ranks 0, 2-3 called barrier(); rank 1 called all_gather(…)"
    for text, wrong in ((told, 0), ("ranks disagree", 3)):
        raised = [Outcome(rank, "InvalidArgument", -1, text, 100.5) for rank in (0, 2, 3)]
        faulty = Outcome(1, "InvalidArgument", -1, told, 100.5)
        assert len(found("mismatch", *raised, faulty=faulty)) == wrong


def test_the_judge_compares_what_codecs_made_on_all_ranks() -> None:
    for digest, wrong in ((7, 0), (8, 1)):
        ranks = [Outcome(0, digests={2: 7}), Outcome(2), Outcome(3, digests={2: digest})]
        problems = found("none", *ranks, faulty=Outcome(1))
        assert len(problems) == wrong
        assert all("do not agree in call 2" in each for each in problems)


def test_cases_have_all_dtypes_and_their_reductions() -> None:
    calls = [each for number in range(1000) for each in make_case(3, number).calls]
    drawn: dict[str, set[str]] = {name: set() for name in REDUCIBLE if name != "bfloat16"}
    for each in calls:
        if each.collective in REDUCING:
            drawn[each.dtype].add(each.op)
    assert drawn == {dtype: set(_core.reductions(dtype)) for dtype in drawn}


def test_cases_have_all_codecs_and_all_that_ranks_can_disagree_in() -> None:
    made = [make_case(3, number, "mismatch") for number in range(500)]
    codecs = {each.codec for case in made for each in case.calls}
    assert codecs == {"none", "fp16", "bf16", *_LOSSY}
    ways = {way for each in _DISAGREEMENTS.values() for way in each}
    assert {case.fault.detail for case in made} - {""} == ways | {"order"}


@pytest.mark.parametrize(("sizes", "wrong"), [((3, 3, 3), 0), ((3, 3, 0), 3), ((0, 0, 0), 3)])
def test_the_judge_counts_who_went_on(sizes: tuple[int, ...], wrong: int) -> None:
    raised = all_raise("TransportError", 1)
    for outcome, size in zip(raised, sizes, strict=True):
        outcome.went_on = size
    assert len(found("kill", *raised, goes_on=True)) == wrong


def test_leaks_are_counted() -> None:
    before, end = Resources.now([]), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    memory = os.memfd_create("gradwire")
    os.truncate(memory, 1)
    mapping = mmap.mmap(memory, 1)
    found = " ".join(sorted(before.more()))
    assert found.startswith("1 mappings 1 threads descriptor"), found
    assert "/memfd:gradwire" in found
    end.set()
    thread.join()
    mapping.close()
    os.close(memory)
    assert before.leaks() == []


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_fault_excuses_a_wrong_result(kind: str) -> None:
    told = found(kind, Outcome(0, wrong=[(2, 2)]), *map(Outcome, (2, 3)))
    assert "rank 0 finished: 2 wrong elements in call 2" in told
