"""The writer of reports: tables, spreads, documents and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.common import report


def test_a_table_is_aligned_and_shows_what_is_missing() -> None:
    rows = [("x", 1, None), ("", "2", "3")]
    assert report.table("a | b | ", rows, "lr") == [
        *("| a | b | |", "|---|---:|---:|", "| x | 1 | – |", "| | 2 | 3 |")
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "–"),
        ([1.0], "+1.00"),
        ([-1.0, -2.0], "−1.50 ± 0.71"),
        ([1.0, None], "not finite"),
        ([1.0, float("inf")], "not finite"),
    ],
)
def test_a_spread_is_mean_and_deviation(values: list[float | None], text: str) -> None:
    assert report.spread(values, 2, sign=True) == text


def test_means_are_of_what_is_known_or_of_all() -> None:
    assert (report.mean([1.0, None, 3.0]), report.mean([None])) == (2.0, None)
    assert (report.mean_of_all([1.0, 3.0]), report.mean_of_all([1.0, None])) == (2.0, None)
    assert report.median_ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0


def test_numbers_have_their_units() -> None:
    assert [report.size(each) for each in (4, 1 << 16, 1 << 28)] == ["4 B", "64 KiB", "256 MiB"]
    assert [report.times(each) for each in (None, 29.66, 123.4)] == ["–", "29.7×", "123×"]


def test_a_document_has_no_empty_parts() -> None:
    parts = ("one", ["| a |"], "", [], report.section("b", []), report.section("c", ["d"]))
    assert report.document("t", *parts) == "# t\n\none\n\n| a |\n\n## c\n\nd\n"


def test_files_lie_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def draw(found: report.Found, path: Path) -> None:
        with report.picture(path, 4, 3, columns=2) as (_, (panels,)):
            report.bars(panels[0], ["a", "b"], found["values"], ".1f", ["C0", "C1"])

    def document(found: report.Found, stem: str) -> str:
        return report.document(stem, f"{found['values']}")

    found: dict[str, Any] = {"values": [1.0, 2.0]}
    report.write(tmp_path / "new/h200.1", "name", found, document, draw)
    assert json.loads((tmp_path / "new/h200.1.json").read_text()) == found
    assert (tmp_path / "new/h200.1.md").read_text() == "# h200.1\n\n[1.0, 2.0]\n"
    assert capsys.readouterr().out.startswith("# h200.1")
    assert (tmp_path / "new/h200.1.png").read_bytes().startswith(b"\x89PNG")
