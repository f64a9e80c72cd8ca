"""Traces in tests: a strict reader of the Chrome trace event format, and what they hold.

"Trace Event Format" (Duval et al., Google 2016): complete events of a thread nest, asynchronous
ones come in pairs, and every event says when, where and of which kind it is.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

_META = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
_ROUNDED = 0.01  # microseconds: times are doubles, and count from months ago


def read(path: Path) -> dict[str, Any]:
    """The file, which keeps to the format and to what gradwire says of itself."""
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(loaded["baseTimeNanoseconds"], int)
    assert loaded["displayTimeUnit"] in ("ms", "ns")
    for each in loaded["traceEvents"]:
        _check(each)
    _check_nesting(loaded["traceEvents"])
    _check_pairs(loaded["traceEvents"])
    return loaded


def _check(entry: Entry) -> None:
    assert isinstance(entry["name"], str), entry
    assert entry["name"], entry
    assert isinstance(entry["pid"], int), entry
    assert isinstance(entry["tid"], int), entry
    assert isinstance(entry.get("args", {}), dict)
    assert isinstance(entry["ts"], int | float), entry
    if entry["ph"] == "M":
        assert entry["name"] in _META
        return
    assert entry["ts"] >= 0
    assert isinstance(entry["cat"], str), entry
    assert set(entry) <= {"name", "cat", "ph", "ts", "dur", "pid", "tid", "id", "args"}
    if entry["ph"] == "X":
        assert entry["dur"] >= 0, entry
    else:
        assert entry["ph"] in ("b", "e"), entry
        assert isinstance(entry["id"], str), entry


def _check_nesting(entries: list[Entry]) -> None:
    threads = defaultdict(list)
    for each in entries:
        if each["ph"] == "X":
            threads[each["pid"], each["tid"]].append(each)
    for listed in threads.values():
        open_until: list[float] = []
        for each in sorted(listed, key=lambda its: (its["ts"], -its["dur"])):
            end = each["ts"] + each["dur"]
            while open_until and open_until[-1] <= each["ts"] + _ROUNDED:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + _ROUNDED, each
            open_until.append(end)


def _check_pairs(entries: list[Entry]) -> None:
    begun: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for each in entries:
        key = (each.get("cat"), each.get("id"), each["pid"])
        if each["ph"] == "b":
            begun[key].append(each)
        elif each["ph"] == "e":
            first = begun[key].pop()
            assert first["name"] == each["name"]
            assert first["ts"] <= each["ts"]
    assert not any(begun.values())


def of(loaded: dict[str, Any], category: str, rank: int | None = None) -> list[Entry]:
    """The complete events of a category, of one rank or all, in order of their begin."""
    found = [
        each
        for each in loaded["traceEvents"]
        if each["ph"] == "X" and each["cat"] == category and rank in (None, each["pid"])
    ]
    return sorted(found, key=lambda each: float(each["ts"]))


def sent_bytes(loaded: dict[str, Any], rank: int) -> int:
    """The bytes of all frames and messages that a rank sent."""
    frames = [*of(loaded, "send", rank), *of(loaded, "encode", rank)]
    frames += [each for each in of(loaded, "message", rank) if each["name"].startswith("send")]
    return sum(each["args"]["bytes_after"] for each in frames)


def encloses(outer: Entry, inner: Entry) -> bool:
    """Whether one event lies within the time of another."""
    return (
        outer["ts"] <= inner["ts"] + _ROUNDED
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + _ROUNDED
    )


def categories(loaded: dict[str, Any]) -> Counter[str]:
    """How many complete events of each category there are."""
    return Counter(each["cat"] for each in loaded["traceEvents"] if each["ph"] == "X")
