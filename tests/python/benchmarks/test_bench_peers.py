"""gradwire beside other libraries: what is timed and checked, and what the report says of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.libraries import peer_rank, peer_teams, peers, peers_report, placement
from bench.libraries.peer_teams import Start, Team

MI = 1 << 20


def case(
    nbytes: int,
    ours: list[float],
    *,
    transport: str = "shm",
    ranks: int = 2,
    op: str = "all_reduce",
    wall: list[float] | None = None,
    **others: list[float],
) -> dict[str, Any]:
    """Seconds of each round."""
    found: dict[str, Any] = {"transport": transport, "ranks": ranks, "op": op, "bytes": nbytes}
    found["seconds"] = {"gradwire": ours, **others}
    if wall is not None:
        found["wall"] = {"bytes": max(nbytes, 1 << 16), "processes": 2, "seconds": wall}
    return found


def report(*cases: dict[str, Any]) -> str:
    found = {"date": "2020-01-01", "machine": "a machine", "command": "-m bench.libraries.peers"}
    found |= {"versions": {"gloo": "torch 2"}, "starts": {"shm, p = 2": {"gloo": "run it"}}}
    return peers_report.document({**found, "cases": list(cases)}, "found")


def row(text: str, *first: str) -> list[str]:
    """The cells after the first ones of the only row that begins so."""
    start = "| " + " | ".join(first) + " |"
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.removeprefix(start).strip("| ").split("|")]


def test_ratios_are_of_the_same_round():
    one = case(4, [1.0, 4.0, 1.0], gloo=[3.0, 8.0, 3.0], openmpi=[2.0, 20.0, 2.0])
    assert peers_report.best(one) == "openmpi"
    assert peers_report.to_best(one) == 2
    assert peers_report.to_gloo(one) == 3
    assert peers_report.one_line(one) == "shm p=2 4 B, 2.00× Open MPI, – ns"


def test_the_wall_of_shared_memory_is_a_copy_for_each_rank():
    assert peers_report.share(case(MI, [4e-3], wall=[1e-3])) == 0.25
    assert peers_report.share(case(MI, [4e-3], ranks=4, wall=[1e-3])) == 0.5  # two at once
    assert peers_report.share(case(1 << 14, [1e-3], wall=[1e-3])) == 0.25  # of 64 KiB
    assert peers_report.share(case(0, [1.0], op="barrier")) is None


def test_the_wall_of_tcp_sends_what_a_rank_must():
    one = case(8 * MI, [2.0], transport="tcp", ranks=4, wall=[1.0])
    one["wall"] |= {"processes": 4, "bytes": 12 * MI}
    assert peers_report.share(one) == 0.5


def test_goals_are_reached_or_not():
    text = report(
        case(4, [0.8e-6], gloo=[100e-6], openmpi=[1e-6]),
        case(64, [1e-6], gloo=[10e-6], openmpi=[0.9e-6]),
        case(16 * MI, [1.0], gloo=[9.0], openmpi=[2.1]),
        case(64 * MI, [1.0], gloo=[9.0], openmpi=[2.2], wall=[0.4]),
        case(0, [1e-6], op="barrier", gloo=[9e-6], openmpi=[2e-6]),
    )
    shm = "shm, p = 2"
    short = ["0.90× at 64 B", "no: 1 of 4 fall short: 0.90× at 64 B"]
    assert row(text, shm, "≥ 1× the best, every size") == short
    assert row(text, shm, "≥ 20× gloo, up to 64 KiB")[0] == "10.00× at 64 B"
    assert row(text, shm, "≥ 50 % of the wall, 64 MiB") == ["40%", "no"]
    assert row(text, shm, "4 B in ≤ 0.9 µs") == ["0.80 µs", "yes"]
    assert row(text, shm, "barrier in ≤ 0.9 µs") == ["1.00 µs", "no"]
    assert row(text, shm, "barrier: ≥ 1× Open MPI") == ["2.00×", "yes"]
    mean = (1.25 * 0.9 * 2.1 * 2.2) ** (1 / 4)
    assert row(text, shm, "geometric mean ≥ 1.3×") == [f"{mean:.2f}×", "yes"]


def test_tcp_has_goals_of_its_own():
    text = report(case(16 * MI, [1.0], transport="tcp", gloo=[1.1], openmpi=[1.3], wall=[0.9]))
    assert row(text, "tcp, p = 2", "≥ 1.2× the best, 8 MiB and above") == ["1.10×", "no"]
    assert row(text, "tcp, p = 2", "≥ 80 % of the wall, 8 MiB and above") == ["90%", "yes"]
    assert row(text, "16 MiB") == [
        *("1,000,000", "1,100,000", "1,300,000", "1.10", "1.30", "1.10", "90%", "–", "–")
    ]


def library(call: Any) -> peer_rank.Library:
    """A library of two ranks, of which this is rank 0."""

    def nothing() -> None:
        pass

    return peer_rank.Library(0, "", range(2), lambda x: (partial(call, x), x), nothing, nothing)


def test_every_wrong_element_is_counted():
    count = peer_rank._AT_ONCE + 3

    def misplaced(x: np.ndarray) -> None:
        x += np.resize(peer_rank._pattern(1), count)
        x[[0, -1]] = x[[-1, 0]]

    assert peer_rank.Case(library(misplaced), "all_reduce", 4 * count).turn(1)[0] == 2
    assert peer_rank.Case(library(lambda x: None), "all_reduce", 4000).turn(1)[0] == 1000


def test_sums_of_timed_calls_stay_finite():
    seen = []

    def doubled(x: np.ndarray) -> None:
        x += x
        seen.append(float(x.max()))

    peer_rank.Case(library(doubled), "all_reduce", 64).turn(9)
    assert seen[1:] == [0.0] * (1 + 9 // 4 + 9)


def test_each_library_is_the_first_in_turn():
    assert [peers.rotated(["a", "b", "c"], turns)[0] for turns in range(4)] == ["a", "b", "c", "a"]


def test_only_more_ranks_than_cores_are_told_to_yield():
    assert "mpi_yield_when_idle" not in peer_teams.start_of("openmpi", "shm", 2, 2).shown()
    assert "mpi_yield_when_idle" in peer_teams.start_of("openmpi", "shm", 4, 2).shown()
    assert "tcp,self" in peer_teams.start_of("openmpi", "tcp", 2, 2).shown()
    shown = peer_teams.start_of("mpich", "tcp", 4, 2).shown()
    assert shown.startswith("MPIR_CVAR_POLLS_BEFORE_YIELD=1 MPIR_CVAR_NOLOCAL=1 UCX_TLS=tcp,self ")


def test_a_rank_that_fails_says_why():
    start = Start([[sys.executable, "-c", "raise SystemExit('no MPI here')"]], {})
    with pytest.raises(RuntimeError, match=r"openmpi did not start: no MPI here"):
        Team("openmpi", start, 2)


def test_a_wrong_result_ends_the_run():
    class Wrong:
        name = "mpich"

        def ask(self, **command: Any) -> list[dict[str, float]]:
            return [{"wrong": 0, "seconds": 1.0}, {"wrong": 2, "seconds": 2.0}]

    with pytest.raises(RuntimeError, match="mpich: 2 elements of an all_reduce are wrong"):
        peers.timed(Wrong(), 1)  # type: ignore[arg-type]


def test_whoever_did_not_use_tcp_is_found_out():
    with pytest.raises(RuntimeError, match="it did not use TCP"):
        peers._check_sent("mpich", 5e4, 100_000)


def test_the_floor_sums():
    with contextlib.ExitStack() as stack:
        start = peer_teams.floor_of(2, stack)
        with contextlib.closing(Team("floor", start, 2)) as team:
            for nbytes in (4, 1 << 20):
                team.ask(do="prepare", op="all_reduce", bytes=nbytes)
                assert [each["wrong"] for each in team.ask(do="turn", calls=3)] == [0, 0]


def test_a_placement_is_told_by_a_line():
    assert placement.unchanged([60, 70, 62])
    assert not placement.unchanged([60, 70, 200])
    cores = len(os.sched_getaffinity(0))
    assert 1 < placement.round_trip() < 1e6 if cores > 1 else placement.round_trip() == 0
    one = {**case(4, [1.0], gloo=[2.0]), "floor": [0.9], "round_trips": [[60.0, 64.0]]}
    assert peers_report.of_floor(one) == 0.9
    assert row(report(one), "4 B")[-2:] == ["90%", "60 to 64"]
    one |= {"bytes": 1 << 16, "floor": [0.89]}
    goal = "≥ 90 % of the floor, 64 KiB and above"
    assert row(report(one), "shm, p = 2", goal) == ["89%", "no"]


def test_walls_do_what_they_say():
    with contextlib.ExitStack() as stack:
        for transport in ("shm", "tcp"):
            start = peer_teams.wall_of(transport, 2, cores=2, stack=stack)
            with contextlib.closing(Team("wall", start, 2)) as team:
                team.ask(do="prepare", op="all_reduce", bytes=1 << 20)
                answers = team.ask(do="turn", calls=3)
                assert [each["wrong"] for each in answers] == [0, 0]
                assert all(each["seconds"] > 0 for each in answers)


def test_libraries_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command = ["peers.py", "--libraries", "gradwire", "gloo", "--transports", "tcp"]
    command += ["--ranks", "2", "--sizes", "16", str(MI), "--seconds", "0.2"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "found")])
    assert peers.main() == 0
    found = json.loads((tmp_path / "found.json").read_text())
    shapes = [(each["op"], each["bytes"]) for each in found["cases"]]
    assert shapes == [("barrier", 0), ("all_reduce", 16), ("all_reduce", MI)]
    rounds = {len(times) for each in found["cases"] for times in each["seconds"].values()}
    assert min(rounds) >= 3
    assert found["cases"][-1]["wall"]["bytes"] == MI
    assert set(found["starts"]["tcp, p = 2"]) == {"gradwire", "gloo"}
    assert (tmp_path / "found.md").read_text(encoding="utf-8").startswith("# all_reduce of float32")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
