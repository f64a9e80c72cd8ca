"""The benchmark of recording, and the picture of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradwire
import numpy as np

from bench.training import trace_cost


def turns(comm: gradwire.Communicator) -> tuple[int, bool]:
    """Rounds of a block, and whether recording is off after them."""
    for watch in (trace_cost.recording, trace_cost.counting):
        found = trace_cost.measure(comm, lambda: comm.all_reduce(np.ones(9)), 3, watch)
        assert all(off > 0 and on > 0 for off, on in found)
    return len(found), comm._track.recorder is None


def test_recording_and_counting_take_turns():
    assert gradwire.spawn(turns, 2) == [(3, True)] * 2


def test_the_table_has_a_row_for_each_case():
    rows = [{"what": "step, none", "us": 1234.5, "ratio": 1.01, "interval": (1.0, 1.02)}]
    found = {"date": "2020-01-01", "ranks": 2, "rounds": 40, "machine": "m", "rows": rows}
    found["command"] = "python -m bench"
    assert "| step, none | 1,234.5 | 1.010 | 1.000 to 1.020 |" in trace_cost.table(found)


def test_a_step_is_drawn(tmp_path: Path):
    from bench.training import trace_picture  # and all of matplotlib

    def event(name: str, category: str, begin: float, length: float) -> dict[str, Any]:
        return {"name": name, "cat": category, "pid": 0, "tid": 1, "ts": begin, "dur": length}

    events = [event("step 1", "program", 0, 100), event("backward", "program", 20, 70)]
    events += [event("all_reduce", "call", 30, 50), event("wait for 1", "wait", 31, 20)]
    trace_picture.draw(events, 1, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000
