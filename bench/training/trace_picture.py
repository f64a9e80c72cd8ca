"""Draws a step of a trace: what each rank's program does, and what its calls do beside that.

gradwire run -n 3 --trace out.json train.py
python -m bench.training.trace_picture out.json step.png --step 3
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

PROGRAM = {"forward": "#9ecae1", "backward": "#6baed6", "optimizer": "#3182bd"}
WAITS = "wait for averages"
CALLS = {
    "wait": "#fdd0a2",
    "wire": "#d9d9d9",
    "encode": "#31a354",
    "decode": "#a1d99b",
    "send": "#756bb1",
    "reduce": "#9e9ac8",
    "receive": "#cbc9e2",
}
_HEIGHT = 0.38
_WORST = "#e6550d"


def main() -> int:
    """Reads the trace and draws."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--step", type=int, default=1)
    options = parser.parse_args()
    events = json.loads(options.trace.read_text())["traceEvents"]
    draw([each for each in events if each["ph"] == "X"], options.step, options.picture)
    return 0


def draw(events: Sequence[dict[str, Any]], step: int, path: Path) -> None:
    """Draws a step, two rows a rank: the program, and its calls."""
    steps = [each for each in events if each["name"] == f"step {step}"]
    begin = min(each["ts"] for each in steps)
    end = max(each["ts"] + each["dur"] for each in steps)
    ranks = sorted({each["pid"] for each in steps})
    inside = [each for each in events if each["ts"] + each["dur"] > begin and each["ts"] < end]
    figure, axes = pyplot.subplots(figsize=(11, 0.9 + 1.15 * len(ranks)), layout="constrained")
    for each in inside:
        top = 2 * ranks.index(each["pid"])
        span = [((each["ts"] - begin) / 1e3, max(each["dur"] / 1e3, (end - begin) / 4e6))]
        if each["name"] in PROGRAM:
            axes.broken_barh(span, (top - _HEIGHT, 2 * _HEIGHT), color=PROGRAM[each["name"]])
        elif each["name"] == WAITS:
            axes.broken_barh(span, (top - _HEIGHT, _HEIGHT), color=_WORST, zorder=3)
        elif each["cat"] == "call" and each["dur"] > 0.02 * (end - begin):
            axes.broken_barh(span, (top + 1 - _HEIGHT, 2 * _HEIGHT), color="none", ec="0.5", lw=0.8)
        elif each["cat"] in CALLS:
            axes.broken_barh(
                span, (top + 1 - _HEIGHT, 2 * _HEIGHT), color=CALLS[each["cat"]], zorder=0
            )
        if each["cat"] in ("wait", "wire") and each["dur"] > 0.05 * (end - begin):
            middle = (each["ts"] + each["dur"] / 2 - begin) / 1e3
            if 0 < middle < (end - begin) / 1e3:
                axes.text(middle, top + 1, each["name"], ha="center", va="center", fontsize=7)
    rows = [label for rank in ranks for label in (f"rank {rank}, program", "calls")]
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlim=(0, (end - begin) / 1e3), xlabel="milliseconds")
    axes.invert_yaxis()
    colours = {**PROGRAM, WAITS: _WORST, **CALLS}
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
