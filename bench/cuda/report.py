"""What bench/gpu.py found, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.common import report
from bench.common.report import Found
from bench.cuda.floors import FLOORS, GOAL, SIZES

_LONG = 400  # characters

_NOTE = (
    f"The floor is the fewest bytes that the work can move; the goal is {GOAL:.0%} of a copy's "
    "bandwidth on them. Times are medians of turns in which a copy of as many elements, the kernel "
    "and torch's operations follow each other; below 64 MiB what a launch costs is part of all. "
    "Where two kernels do the work the second reads what the first has written."
)


def document(found: Found) -> str:
    """The md file."""
    gpu = found["gpu"]
    versions = ", ".join(f"{name} {gpu[name]}" for name in ("driver", "CUDA", "torch", "NCCL"))
    kernels = of_kernels(found)
    return report.document(
        "gradwire on a GPU",
        f"{found['date']}; {gpu['name']}, {versions}; {found['machine']}; "
        f"`python {found['command']}`, {found['seconds']:.0f} s.",
        verdict(found),
        checks(found["stages"]),
        *([speeds(kernels), _NOTE] if kernels else []),
        _calls([each for each in found["times"] if "call" in each]),
        _steps([each for each in found["times"] if "step" in each]),
    )


def of_kernels(found: Found) -> list[Found]:
    """The times of kernels."""
    return [each for each in found["times"] if "job" in each]


def _calls(calls: Sequence[Found]) -> list[str]:
    """A row for each call from Python, with times and launches by size."""
    sizes = sorted({each["bytes"] for each in calls})
    by_row: dict[tuple[str, str], dict[int, Found]] = {}
    for each in calls:
        row = (f"{each['p']} over {each['links']}", each["call"])
        by_row.setdefault(row, {})[each["bytes"]] = each
    rows = ((*row, *map(_call_cell, map(its.get, sizes))) for row, its in by_row.items())
    head = ["ranks", "all_reduce", *(f"{_bytes(size)}: µs (host, launches)" for size in sizes)]
    return report.table(" | ".join(head), rows, "ll") if calls else []


def _call_cell(time: Found | None) -> str | None:
    if time is None:
        return None
    launches = "?" if time["launches"] is None else time["launches"]
    return f"{time['seconds'] * 1e6:,.0f} ({time['host_seconds'] * 1e6:,.0f}, {launches})"


def _steps(steps: Sequence[Found]) -> list[str]:
    """A row for each way to average gradients in DDP; the first one is what others are beside."""
    first = steps[0]["seconds"] if steps else 1.0
    rows = (
        (each["step"], f"{each['seconds'] * 1e3:.2f}", f"{each['seconds'] / first:.2f}")
        for each in steps
    )
    head = f"DDP step, {steps[0]['p']} ranks | ms | beside the first" if steps else ""
    return report.table(head, rows) if steps else []


def _bytes(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size} B"


def verdict(found: Found) -> str:
    """A sentence."""
    rows = [row for stage in found["stages"] for row in stage["rows"]]
    count = sum(row.get("checks", 0) for row in rows)
    failed = [row for row in rows if not row["passed"]]
    said = f"{count:,} checks in {len(rows)} groups"
    said += f", of which {len(failed)} failed" if failed else ", all passed"
    for instead in ("skipped", "incomplete"):
        some = [row for row in rows if row.get(instead)]
        said += f"; {len(some)} were {instead}" if some else ""
    return said + "."


def checks(stages: Sequence[Found]) -> list[str]:
    """A row for each group of a stage, with its first failure or else its first note."""
    by_group: dict[tuple[str, str], list[Found]] = {}
    for stage in stages:
        for row in stage["rows"]:
            by_group.setdefault((stage["name"], row["group"]), []).append(row)
    rows = (
        (stage, _cell(group), len(rows), f"{sum(r.get('checks', 0) for r in rows):,}", _said(rows))
        for (stage, group), rows in by_group.items()
    )
    return report.table("stage | group | cases | checks | ", rows, "llrrl")


def _said(rows: Sequence[Found]) -> str:
    failed = [row for row in rows if not row["passed"]]
    if failed:
        return f"**FAILED** {_cell(failed[0]['case'])}: {_cell(failed[0]['detail'])}"
    for instead in ("incomplete", "skipped"):
        some = [row for row in rows if row.get(instead)]
        if some:
            return f"{instead}: {_cell(some[0]['detail'])}"
    notes = [row["detail"] for row in rows if row.get("detail")]
    return f"passed: {_cell(notes[0])}" if notes else "passed"


def _cell(text: str) -> str:
    """On one line, without what would end the cell; of a long one the beginning and the end."""
    line = " ".join(text.replace("|", "/").split())
    return line if len(line) <= _LONG else f"{line[: _LONG // 2]} … {line[-_LONG // 2 :]}"


def speeds(times: Sequence[Found]) -> list[str]:
    """A row for each job: its share of a copy's bandwidth at each size, and torch's time beside."""
    sizes = [n for n in SIZES if any(each["n"] == n for each in times)]
    head = ["kernel", "floor, bytes", *map(_size, sizes), "goal", "torch's operations"]
    align = "lr" + "r" * len(sizes) + "ll"
    return report.table(" | ".join(head), _speed_rows(times, sizes), align)


def _speed_rows(times: Sequence[Found], sizes: Sequence[int]) -> Iterator[list[str | None]]:
    by_job = {(each["job"], each["n"]): each for each in times}
    for floor in FLOORS:
        own = [by_job[floor.job, n] for n in sizes if (floor.job, n) in by_job]
        if not own:
            continue
        missed = [_size(each["n"]) for each in own if not each["reached"]]
        goal = "reached" if not missed else f"missed at {', '.join(missed)}"
        times_as_long = own[-1]["torch_seconds"] / own[-1]["seconds"]
        beside = f"{floor.beside}: {times_as_long:.1f}× as long at {_size(own[-1]['n'])}"
        shares = (_share(by_job.get((floor.job, n))) for n in sizes)
        yield [floor.job, f"{floor.bytes:.2f}", *shares, goal, beside]


def _share(time: Found | None) -> str | None:
    """And gigabytes a second, of the floor's bytes."""
    if time is None:
        return None
    rate = time["floor"] * time["n"] / time["seconds"] / 1e9
    return f"{time['share']:.2f} ({rate:,.0f} GB/s)"


def _size(n: int) -> str:
    return f"{n >> 20} M"


def copy_rate(times: Sequence[Found]) -> float:
    """GB/s read and written, by the copies of the most elements."""
    n = max(each["n"] for each in times)
    seconds = min(each["copy_seconds"] for each in times if each["n"] == n)
    return 8 * n / seconds / 1e9
