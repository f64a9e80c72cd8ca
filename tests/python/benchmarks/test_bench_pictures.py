"""The pictures of the docs come from the newest results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import pictures
from bench.common.report import RESULTS
from bench.tables import newest
from bench.training import elastic


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_drawn_from_the_newest_results(name: str, tmp_path: Path):
    pattern, draw = pictures.PICTURES[name]
    found = newest(RESULTS, pattern)
    shown = (pictures.DRAWN / f"{name}.png").read_bytes()
    assert shown == found.with_suffix(".png").read_bytes()
    draw(json.loads(found.read_text(encoding="utf-8")), tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_a_loss_and_a_join_are_marked_when_they_happened():
    steps = [[1.0, 1, 3], [2.0, 2, 3], [3.5, 3, 2], [4.5, 4, 2], [9.0, 5, 3], [10.0, 6, 3]]
    case = {"steps": steps, "times": [{"lost": 1.0, "joined": 6.0}]}
    marks = {0.5: "another starts", 6.5: "it trains"}
    assert elastic._first_change(case) == (2.5, marks)


def test_a_restart_is_marked_where_steps_begin_again():
    steps = [[1.0, 1, 3], [2.0, 2, 3], [9.0, 1, 3], [10.0, 2, 3]]
    case = {"steps": steps, "times": [{"lost": 6.0}]}
    assert elastic._first_change(case) == (3.0, {6.0: "all begin again"})
