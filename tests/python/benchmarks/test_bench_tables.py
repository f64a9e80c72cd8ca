"""The documents' tables are made from the results, and are what the newest of them say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import tables
from bench.common import report
from bench.training import methods
from bench.training.train_runs import Point, Result, Run, append

OLD = "onebit+dense=0.1"  # an option that methods had once


def write_runs(path: Path, names: tuple[str, ...]) -> None:
    """Two seeds of each; every method ends a point below the one before it, at twice its ratio."""
    for batch in (16, 64):
        for place, method in enumerate(names):
            for seed in (1, 2):
                run = Run(method, batch, seed, 3, 0.1, 0.05, 4, "auto", "Fashion-MNIST")
                curve = [Point(at, 0.9, 1, at * 6000 / 2**place) for at in (20, 100)]
                found = 0.9 - place / 100 + seed / 1000
                append(path, Result(run, 1000, found, 1, True, 0.02, curve, "2020-01-01", {}))


def write_steps(path: Path, names: tuple[str, ...]) -> None:
    links = {link: {name: 10.0 + i for i, name in enumerate(names)} for link in tables._LINKS}
    path.write_text(json.dumps({"step_ms": links}))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write_runs(tmp_path / "train-runs-2020-01-02.jsonl", (*methods.TRAINED, OLD))
    timed = ("gloo", *methods.TRAINED[:-1], f"{methods.LOW_RANK.partition('+')[0]}+int8=0.5", OLD)
    write_steps(tmp_path / "step-times-2020-01-02.json", timed)
    return tmp_path


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda each: each.name)
def test_a_document_says_what_the_results_say(document: Path):
    text = document.read_text(encoding="utf-8")
    assert tables.rewritten(text, tables.RESULTS) == text


def test_each_table_is_in_a_document():
    texts = [each.read_text(encoding="utf-8") for each in tables.DOCUMENTS]
    for name in tables.TABLES:
        assert any(f"<!-- table: {name} -->" in text for text in texts), name


def test_codecs_are_compared_by_seed(results: Path):
    rows = {row.split(" | ")[0]: row.split(" | ")[1:] for row in tables.codecs(results)[2:]}
    assert list(rows)[3:7] == ["| none", "| fp16", "| bf16", "| int8"]
    assert rows["| none"] == ["90.15 (2)", "90.15 (2)", "1.0×", "11.0", "11.0", "11.0 |"]
    assert rows["| int8"] == ["-3.00 (2)", "-3.00 (2)", "8.0×", "14.0", "14.0", "14.0 |"]
    assert rows["| gloo DDP"] == ["–", "–", "–", "10.0", "10.0", "10.0 |"]
    assert rows["| topk ³"][0] == "-7.00 (2)"
    assert rows["| lowrank"][3] == "19.0"  # timed with another share of int8 before it


def test_the_newest_file_counts(results: Path):
    write_steps(results / "step-times-2020-01-01.json", ())
    assert tables.newest(results, "step-times-*.json").name == "step-times-2020-01-02.json"


def test_only_marked_tables_change_and_only_by_complete_results(
    results: Path, capsys: pytest.CaptureFixture[str]
):
    text = "before\n<!-- table: codecs -->\nold\n<!-- end -->\nafter\n"
    made = tables.rewritten(text, results)
    assert made.startswith("before\n<!-- table: codecs -->\n\n| | accuracy, 16 |")
    assert made.endswith(" |\n\n<!-- end -->\nafter\n")
    assert tables.rewritten(made, results) == made
    write_steps(results / "step-times-2020-01-03.json", methods.TRAINED[1:])
    assert tables.rewritten(text, results) == text
    assert "has no steps over 100mbit of none" in capsys.readouterr().err
    write_runs(results / "train-runs-2020-01-03.jsonl", methods.TRAINED[:-1])
    assert tables.rewritten(text, results) == text
    assert f"no 16-image runs of {methods.LOW_RANK}" in capsys.readouterr().err


def test_check_changes_nothing(results: Path, monkeypatch: pytest.MonkeyPatch):
    readme = results / "README.md"
    readme.write_text("<!-- table: codecs -->\nold\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(tables, "DOCUMENTS", [readme])
    monkeypatch.setattr(tables, "RESULTS", results)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 1
    assert "old" in readme.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    assert tables.main() == 0
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0


def peers_case(transport: str, ranks: int, nbytes: int) -> dict[str, Any]:
    seconds = {"gradwire": [4e-6], "gloo": [4e-5], "openmpi": [1e-5]}
    case = {"transport": transport, "ranks": ranks, "op": "all_reduce", "bytes": nbytes}
    return {**case, "seconds": seconds}


def test_peers_are_compared_with_the_best_and_gloo(tmp_path: Path):
    cases = [
        peers_case(transport, ranks, nbytes)
        for transport in ("shm", "tcp")
        for ranks in (2, 4, 8)
        for nbytes in tables._SIZES
    ]
    path = tmp_path / "peers-2020-01-01.json"
    measured = {"date": "2020-01-01 09:00 UTC", "machine": "a machine, other work 0 %"}
    path.write_text(json.dumps({"cases": cases, **measured}))
    said, _, *rows = tables.peers(tmp_path)
    assert said.startswith("2020-01-01, a machine, other work 0 %;")
    assert rows[2] == "| 4 B |" + " 4.00 (2.5×, 10.0×) |" * 4
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        f"| {report.size(each)}" for each in tables._SIZES
    ]
    path.write_text(json.dumps({"cases": cases[1:]}))
    with pytest.raises(tables.Incomplete, match="no 4 bytes over shm, p = 2"):
        tables.peers(tmp_path)
