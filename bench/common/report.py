"""Writes reports: Markdown tables, means with their spread, pictures, and the files of a result."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common.machine import OtherLoad

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
OURS, OTHERS, NEUTRAL = "#1463b0", "#b3123a", "#777777"  # colours
PAGE = 6.2  # inches of a picture that can be read on a page 742 px wide, and on a phone

Found = Mapping[str, Any]  # what a measurement found: the content of its json
Cells = Iterable[str | int | None]


def table(head: str, rows: Iterable[str | Cells], align: str = "l") -> list[str]:
    """A table's lines; `head`, and a row that is a text, is divided by bars.

    `align` has an l (left) or r for each column, and columns without one are aligned to the right.
    A cell that is None is shown as –.
    """
    columns = len(_divided(head))
    marks = ["---" if side == "l" else "---:" for side in align.ljust(columns, "r")]
    return [_line(head), f"|{'|'.join(marks)}|", *map(_line, rows)]


def _line(row: str | Cells) -> str:
    cells = _divided(row) if isinstance(row, str) else row
    texts = ["–" if each is None else str(each) for each in cells]
    return f"|{'|'.join(f' {each} ' if each else ' ' for each in texts)}|"


def _divided(row: str) -> list[str]:
    r"""Its cells; \| is a bar in one."""
    return [each.strip() for each in re.split(r"(?<!\\)\|", row)]


def shown(value: float | None, form: str) -> str:
    """A value in a form such as "{:.1f}×"; – for None."""
    return "–" if value is None else form.format(value)


def spread(values: Sequence[float | None], digits: int, *, sign: bool = False) -> str:
    """Mean ± standard deviation; – of no values, "not finite" where one is not, or None."""
    known = [each for each in values if each is not None and math.isfinite(each)]
    if len(known) < len(values):
        return "not finite"
    if not known:
        return "–"
    text = f"{statistics.fmean(known):{'+' if sign else ''}.{digits}f}"
    if len(known) > 1:
        text += f" ± {statistics.stdev(known):.{digits}f}"
    return text.replace("-", "−")


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known; None where none is."""
    known = [each for each in values if each is not None]
    return statistics.fmean(known) if known else None


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """The mean of the values; None if one of them is None, or there are none."""
    return None if None in values else mean(values)


def median_ratio(over: Iterable[float], under: Iterable[float]) -> float:
    """The median of the quotients of what was measured in the same round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def times(ratio: float | None) -> str:
    """A ratio of bytes, as in 29.7×."""
    return "–" if ratio is None else f"{ratio:.{1 if ratio < 100 else 0}f}×"


def size(nbytes: int) -> str:
    """4 B, 64 KiB, 256 MiB."""
    for scale, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes} B"


def yes(true: bool) -> str:
    """Whether a goal was reached, in a table."""
    return "yes" if true else "no"


def reached(true: bool) -> str:
    """Whether a goal was reached, in a sentence."""
    return "reached" if true else "missed"


def document(title: str, *parts: str | Iterable[str]) -> str:
    """A Markdown file of paragraphs, and of lines as of a table; empty parts are left out."""
    texts = (each if isinstance(each, str) else "\n".join(each) for each in parts)
    return "\n\n".join([f"# {title}", *(each for each in texts if each)]) + "\n"


def section(title: str, *parts: str | Iterable[str]) -> str:
    """A part of a document with its own heading; nothing where all its parts are empty."""
    texts = [each if isinstance(each, str) else "\n".join(each) for each in parts]
    return "\n\n".join([f"## {title}", *filter(None, texts)]) if any(texts) else ""


def origin(found: Found) -> str:
    """When, where and by which command it was measured."""
    return f"{found['date']}; {found['machine']}; `python {found['command']}`."


def stamp(module: str, load: OtherLoad) -> dict[str, str]:
    """What `origin` tells of a measurement that ends now."""
    now = datetime.datetime.now(datetime.timezone.utc)
    command = shlex.join(["-m", module, *sys.argv[1:]])
    date = now.strftime("%Y-%m-%d %H:%M UTC")
    return {"date": date, "machine": load.describe(), "command": command}


def stem_of(output: Path | None, name: str) -> Path:
    """The path that was asked for, or NAME-DATE among the results."""
    return output or RESULTS / f"{name}-{datetime.date.today().isoformat()}"


def write(
    output: Path | None,
    name: str,
    found: Found,
    document: Callable[[Found, str], str],
    draw: Callable[[Found, Path], None] | None = None,
) -> None:
    """Writes NAME-DATE.json, .md and, if drawn, .png, or OUTPUT's; prints the report."""
    stem = stem_of(output, name)
    text = document(found, stem.name)
    save(stem, found, text)
    if draw is not None:
        draw(found, beside(stem, ".png"))
    print(text)


def save(stem: Path, found: Found | None, text: str) -> None:
    """Writes STEM.md, STEM.json unless `found` is None, and their directory if need be."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    if found is not None:
        beside(stem, ".json").write_text(json.dumps(found, indent=1) + "\n")
    beside(stem, ".md").write_text(text, encoding="utf-8")


def save_runs(stem: Path, runs: Path, text: str) -> None:
    """Copies a file of runs to STEM-runs.jsonl if it is another, and writes STEM.md."""
    save(stem, None, text)
    if runs.resolve() != beside(stem, "-runs.jsonl").resolve():
        shutil.copyfile(runs, beside(stem, "-runs.jsonl"))


def beside(stem: Path, suffix: str) -> Path:
    """STEM and a suffix; a stem may have a dot in it."""
    return stem.with_name(stem.name + suffix)


@contextlib.contextmanager
def picture(
    path: Path, width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A figure of so many inches, and its rows of panels; written when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width, height)
    with pyplot.rc_context({"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10}):
        figure, panels = pyplot.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained", **options
        )
        for panel in panels.flat:
            panel.grid(alpha=0.3)
            panel.set_axisbelow(True)
        yield figure, panels
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def bars(
    panel: Any, names: Sequence[str], values: Sequence[float], form: str, colours: Sequence[str]
) -> None:
    """Bars from the top down, each with its name before it and its value behind."""
    panel.barh(range(len(names)), values, color=colours)
    for place, value in enumerate(values):
        panel.text(value, place, f" {value:{form}}", va="center", fontsize=10)
    panel.set_yticks(range(len(names)), labels=names)
    panel.yaxis.set_inverted(True)
    panel.margins(x=0.2)
