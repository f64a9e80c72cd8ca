"""The benchmark measures what it says, and counts wrong results."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire import Communicator
from gradwire._tools import cli
from gradwire.lab.commands import bench as _bench
from gradwire.lab.tuning import measure
from gradwire.lab.tuning.measure import COLLECTIVES, Case
from ranks import LIMIT, nightly, on_ranks, run

BENCH_OPTIONS = ("-b", "64", "-e", "4K", "-f", "8", "-n", "2", "-w", "1")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def bench(*options: str) -> str:
    return bench_of(*BENCH_OPTIONS, *options)


def bench_of(*options: str) -> str:
    command = [sys.executable, "-m", "gradwire", "bench", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_table_has_the_columns_of_nccl_tests():
    lines = bench("-g", "2").splitlines()
    assert lines[1].split() == [
        *("size(B)", "count", "type", "redop"),
        *("time(us)", "algbw(GB/s)", "busbw(GB/s)", "#wrong"),
    ]
    assert [line.split()[:4] for line in lines[2:-2]] == [
        ["64", "16", "float32", "sum"],
        ["512", "128", "float32", "sum"],
        ["4096", "1024", "float32", "sum"],
    ]
    assert all(line.split()[-1] == "0" for line in lines[2:-2])
    assert lines[-2].split(":")[1].split() == ["0", "OK"]
    assert lines[-1].startswith("# Avg bus bandwidth")


def test_the_letters_are_those_of_nccl_tests():
    options = ("-g", "3", "-b", "96", "-e", "192", "-i", "96", "-o", "max", "-d", "half")
    lines = bench_of(*options, "-c", "0", "-n", "1", "-w", "0", "-r", "2").splitlines()
    assert "3 ranks" in lines[0]
    assert "1 iterations" in lines[0]
    assert [line.split()[:4] + line.split()[-1:] for line in lines[2:-2]] == [
        ["96", "48", "float16", "max", "N/A"],
        ["192", "96", "float16", "max", "N/A"],
    ]


def test_all_types_and_ops_go_together_as_they_can():
    options = ("-g", "2", "-b", "64", "-e", "64", "-o", "all", "-d", "all", "-n", "1", "--csv")
    rows = list(csv.DictReader(io.StringIO(bench_of(*options))))
    found = {(row["type"], row["redop"]) for row in rows}
    assert ("bfloat16", "avg") in found
    assert ("int8", "prod") in found
    assert ("uint16", "lxor") in found
    assert ("bool", "avg") not in found
    assert ("float32", "band") not in found
    assert len(found) == len(rows) == 4 * 5 + 9 * 10 + 2 * 2
    assert {row["#wrong"] for row in rows} == {"0"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("-o", "avg", "-d", "bool"), "op 'avg' of bool is not defined"),
        (("-o", "band", "-d", "half"), "op 'band' of float16 is not defined"),
        (("-d", "float128x"), "--dtype float128x"),
        (("-o", "all", "--plot", "x.png"), "--plot draws one type and one op"),
        (("-r", "2"), "--root 2 is no rank of 2"),
        (("-c", "-1"), "--check at least 0"),
        (("-i", "0.5"), "--step-bytes 0 does not grow"),
        (("--algorithm", "gather(pigeon)"), "all_gather has no algorithm 'pigeon'"),
        (("--collective", "broadcast", "--algorithm", "gather"), "no algorithm 'gather'"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    options: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str], bare_environment: None
):
    assert cli.main(["bench", *options]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "-1K", "much"])
def test_what_is_no_size_is_refused(size: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["bench", f"--step-bytes={size}"])
    assert repr(size) in capsys.readouterr().err


def test_json_says_what_was_measured():
    found = json.loads(bench("-g", "2", "--json", "--transport", "tcp", "--codec", "fp16"))
    assert (found["ranks"], found["transports"], found["codec"]) == (2, "tcp", "fp16")
    row = found["results"][-1]
    assert row["algbw(GB/s)"] == pytest.approx(4096 / row["time(us)"] / 1e3)
    assert row["busbw(GB/s)"] == pytest.approx(row["algbw(GB/s)"])  # 2(p-1)/p is 1 at p = 2


@pytest.mark.parametrize("algorithm", ["gather(ring)", *nightly("gather")])
def test_gathered_sums_can_be_measured(algorithm: str):
    found = json.loads(bench("-g", "3", "--json", "--algorithm", algorithm))
    assert found["algorithm"] == algorithm
    assert {row["#wrong"] for row in found["results"]} == {0}


def test_csv_and_plot(tmp_path: Path):
    path = tmp_path / "bandwidth.png"
    rows = list(csv.DictReader(io.StringIO(bench("-g", "1", "--csv", "--plot", str(path)))))
    assert [row["count"] for row in rows] == ["16", "128", "1024"]
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_right_results_count_as_right(collective: str, ranks: int):
    for count in (ranks, 5 * ranks, 1024 * ranks):
        case = Case(collective, count, root=ranks - 1 if collective in ROOTED else 0)
        assert run(ranks, measure.wrong_elements, case) == [0] * ranks


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        *product(["float16", "bfloat16", "float64"], ["sum", "avg", "min", "max", "prod"]),
        *product(["int8", "uint16"], ["sum", "min", "max", "prod", "bxor", "land"]),
        *product(["bool"], ["sum", "min", "max", "prod", "band", "bor", "bxor", "lxor"]),
        *product(["complex64", "complex128"], ["sum", "avg"]),
    ],
)
def test_every_type_and_op_has_its_expected_values(dtype: str, op: str):
    assert run(3, measure.wrong_elements, Case("all_reduce", 100, dtype, op)) == [0] * 3


class OneWrong:
    """A communicator whose rank 1 finds its first element off by one."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._comm, name)
        if name not in COLLECTIVES or self.rank != 1:
            return method

        def spoilt(x: Any, **options: Any) -> Any:
            result = method(x, **options)
            if result.dtype == np.float32:
                result[0] += 1
            return result

        return spoilt


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "scatter", "all_to_all"])
@on_ranks(2)
def test_a_wrong_element_is_counted_on_all_ranks(comm: Communicator, collective: str) -> None:
    assert measure.wrong_elements(OneWrong(comm), Case(collective, 6)) == 1


def test_a_measured_time_is_the_slowest_ranks():
    assert run(3, lambda comm: measure.slowest(comm, float(comm.rank))) == [2.0] * 3


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75), ("broadcast", 1.0)],
)
def test_bus_bandwidth_follows_nccl_tests(collective: str, factor: float):
    assert Case(collective, 4).busbw_factor(4) == factor


def test_sizes_grow_by_the_factor_and_never_stand_still():
    assert list(_bench.sizes(4, 64, 4)) == [4, 16, 64]
    assert list(_bench.sizes(1, 4, 1.1)) == [1, 2, 3, 4]
    assert list(_bench.sizes(4, 13, 2, step=4)) == [4, 8, 12]


def test_blocks_are_whole_and_never_empty():
    assert measure.case_of_bytes(4, 3, collective="all_gather").count == 3
    assert measure.case_of_bytes(100, 3, collective="all_gather").nbytes == 96
    assert measure.case_of_bytes(100, 3, collective="all_reduce").nbytes == 100
