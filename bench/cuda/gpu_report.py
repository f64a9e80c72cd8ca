"""What bench/gpu.py found, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.cuda.gpu_floors import FLOORS, GOAL, SIZES

Found = Mapping[str, Any]
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
    lines = [
        "# gradwire on a GPU",
        "",
        f"{found['date']}; {gpu['name']}, {versions}; {found['machine']}; "
        f"`python {found['command']}`, {found['seconds']:.0f} s.",
        "",
        verdict(found),
        "",
        *checks(found["stages"]),
    ]
    if of_kernels(found):
        lines += ["", *speeds(of_kernels(found)), "", _NOTE]
    lines += [*_calls(found["times"]), *_steps(found["times"])]
    return "\n".join(lines) + "\n"


def of_kernels(found: Found) -> list[Found]:
    """The times of kernels."""
    return [each for each in found["times"] if "job" in each]


def _calls(times: Sequence[Found]) -> list[str]:
    """A row for each call from Python, with times and launches by size."""
    calls = [each for each in times if "call" in each]
    if not calls:
        return []
    sizes = sorted({each["bytes"] for each in calls})
    head = " | ".join(f"{_bytes(size)}: µs (host, launches)" for size in sizes)
    lines = ["", f"| ranks | all_reduce | {head} |", "|---|---|" + "---:|" * len(sizes)]
    by_row: dict[tuple[str, str], dict[int, Found]] = {}
    for each in calls:
        row = (f"{each['p']} over {each['links']}", each["call"])
        by_row.setdefault(row, {})[each["bytes"]] = each
    for (ranks, call), by_size in by_row.items():
        cells = " | ".join(_call_cell(by_size.get(size)) for size in sizes)
        lines.append(f"| {ranks} | {call} | {cells} |")
    return lines


def _call_cell(time: Found | None) -> str:
    if time is None:
        return "–"
    launches = "?" if time["launches"] is None else time["launches"]
    return f"{time['seconds'] * 1e6:,.0f} ({time['host_seconds'] * 1e6:,.0f}, {launches})"


def _steps(times: Sequence[Found]) -> list[str]:
    """A row for each way to average gradients in DDP; the first one is what others are beside."""
    steps = [each for each in times if "step" in each]
    if not steps:
        return []
    first = steps[0]["seconds"]
    lines = ["", f"| DDP step, {steps[0]['p']} ranks | ms | beside the first |", "|---|---:|---:|"]
    for each in steps:
        ms, ratio = each["seconds"] * 1e3, each["seconds"] / first
        lines.append(f"| {each['step']} | {ms:.2f} | {ratio:.2f} |")
    return lines


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
    lines = ["| stage | group | cases | checks | |", "|---|---|---:|---:|---|"]
    for stage in stages:
        for group, rows in _by_group(stage["rows"]).items():
            count = sum(row.get("checks", 0) for row in rows)
            lines.append(
                f"| {stage['name']} | {_cell(group)} | {len(rows)} | {count:,} | {_said(rows)} |"
            )
    return lines


def _by_group(rows: Sequence[Found]) -> dict[str, list[Found]]:
    found: dict[str, list[Found]] = {}
    for row in rows:
        found.setdefault(row["group"], []).append(row)
    return found


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
    lines = [
        f"| kernel | floor, bytes | {' | '.join(map(_size, sizes))} | goal | torch's operations |",
        "|---|---:|" + "---:|" * len(sizes) + "---|---|",
    ]
    return [*lines, *_speed_rows(times, sizes)]


def _speed_rows(times: Sequence[Found], sizes: Sequence[int]) -> Iterator[str]:
    by_job = {(each["job"], each["n"]): each for each in times}
    for floor in FLOORS:
        own = [by_job[floor.job, n] for n in sizes if (floor.job, n) in by_job]
        if not own:
            continue
        cells = [_share(by_job.get((floor.job, n))) for n in sizes]
        missed = [_size(each["n"]) for each in own if not each["reached"]]
        goal = "reached" if not missed else f"missed at {', '.join(missed)}"
        largest = own[-1]
        times_as_long = largest["torch_seconds"] / largest["seconds"]
        beside = f"{floor.beside}: {times_as_long:.1f}× as long at {_size(largest['n'])}"
        yield f"| {floor.job} | {floor.bytes:.2f} | {' | '.join(cells)} | {goal} | {beside} |"


def _share(time: Found | None) -> str:
    """And gigabytes a second, of the floor's bytes."""
    if time is None:
        return "–"
    rate = time["floor"] * time["n"] / time["seconds"] / 1e9
    return f"{time['share']:.2f} ({rate:,.0f} GB/s)"


def _size(n: int) -> str:
    return f"{n >> 20} M"


def copy_rate(times: Sequence[Found]) -> float:
    """GB/s read and written, by the copies of the most elements."""
    n = max(each["n"] for each in times)
    seconds = min(each["copy_seconds"] for each in times if each["n"] == n)
    return 8 * n / seconds / 1e9
