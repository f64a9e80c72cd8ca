"""Merging: one file of all processes' records, on one time axis, in the Chrome trace format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gradwire._errors import InvalidArgument
from gradwire._trace import clocks, parts
from gradwire._trace.chrome import Entry, Others, Writer, base_time
from gradwire._trace.clocks import Clock, Messages
from gradwire._trace.parts import TracePart

VERSION = 1  # of what "gradwire" in a file says

Progress: TypeAlias = Callable[[float, str], None]


def write(
    found: Sequence[TracePart],
    path: Path,
    *,
    profiles: Iterable[Path] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes the file, whole or not at all; returns what it says of itself.

    Its folder is made if it is not there. `profiles` are files of torch.profiler, whose events are
    added. Raises InvalidArgument for files that are none, and OSError.
    """
    found = sorted(found, key=lambda each: (each.ranks, each.process))
    aligned = clocks.align(found)
    base = base_time(found[0].unix_offset + _first_time(found))
    about = _about(found, aligned)
    added = [list(_profile(each, base, found)) for each in profiles]
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write('{"schemaVersion": 1, "displayTimeUnit": "ms",\n')
            file.write(f'"baseTimeNanoseconds": {base},\n"gradwire": {json.dumps(about)},\n')
            file.write('"traceEvents": [\n')
            separator = ""
            for index, entries in enumerate([*_all(found, aligned, base), *added]):
                for entry in entries:
                    file.write(separator + json.dumps(entry))
                    separator = ",\n"
                if progress is not None:
                    progress((index + 1) / (len(found) + len(added)), f"{index + 1} processes")
            file.write("\n]}\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return about


def _first_time(found: Sequence[TracePart]) -> int:
    times = [each.events["begin"].min() for each in found[0].tracks if len(each.events)]
    return int(min(times, default=0))


def _all(
    found: Sequence[TracePart], aligned: Sequence[Clock], base: int
) -> Iterator[Iterator[Entry]]:
    others = _others(found, aligned)
    for part, clock in zip(found, aligned, strict=True):
        yield Writer(part, clock, base).entries(others)


def _others(found: Sequence[TracePart], aligned: Sequence[Clock]) -> Others:
    sent, begun = [], {}
    for part, clock in zip(found, aligned, strict=True):
        ours = clocks.messages(part, sent=True)
        sent.append((ours.keys, clock.unix(ours.times), clock.unix(ours.ends)))
        for track in part.tracks:
            phases = track.events[track.events["kind"] == parts.PHASE]
            place, times = track.place, clock.unix(phases["begin"])
            for number, at in zip(phases["operation"].tolist(), times.tolist(), strict=True):
                begun[place.communicator, number, place.job_rank] = at
    keys, times, ends = (np.concatenate(columns) for columns in zip(*sent, strict=True))
    order = np.argsort(keys, kind="stable")
    return Others(Messages(keys[order], times[order], ends[order]), begun)


def _about(found: Sequence[TracePart], aligned: Sequence[Clock]) -> dict[str, Any]:
    """Tells what the file says of itself: ranks, clocks, and what is missing."""
    there = {rank for each in found for rank in each.ranks}
    members = {rank for each in found for track in each.tracks for rank in track.place.job_ranks}
    return {
        "version": VERSION,
        "job": found[0].job[0],
        "ranks": sorted(there),
        "missing": sorted(members - there),
        "clocks": [
            {
                "ranks": part.ranks,
                "host": part.host,
                "process": part.process,
                "offset_ns": clock.offset,
                "error_ns": clock.error,
                "unix_error_ns": part.unix_error,
            }
            for part, clock in zip(found, aligned, strict=True)
        ],
        "recorded": sum(len(t.events) + len(t.spans) for each in found for t in each.tracks),
        "dropped": sum(
            each.forgotten + sum(t.dropped + t.spans_dropped for t in each.tracks) for each in found
        ),
    }


def _profile(path: Path, base: int, found: Sequence[TracePart]) -> Iterator[Entry]:
    """The events of a file of torch.profiler; those of our processes are put beside our events."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        shift = (int(loaded.get("baseTimeNanoseconds", 0)) - base) / 1e3
        events = loaded["traceEvents"]
        ranks = {each.process: each.ranks[0] for each in found}
        for entry in events:
            entry["pid"] = ranks.get(entry.get("pid"), entry.get("pid"))
            if "ts" in entry and entry.get("ph") != "M":
                entry["ts"] = float(entry["ts"]) + shift
            ours = entry["pid"] in ranks.values()
            if not (ours and entry.get("name") in ("process_name", "process_sort_index")):
                yield entry
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidArgument(f"{path} is no trace of torch.profiler: {error!r}") from error


def describe(about: dict[str, Any]) -> str:
    """One line about a merged file: ranks, errors of the clocks, what is missing."""
    errors = [each["error_ns"] for each in about["clocks"]]
    known = [each for each in errors if each is not None]
    text = f"{len(about['ranks'])} ranks, {about['recorded']} events"
    if len(errors) > 1:
        text += f", clocks within {max(known, default=0) / 1e3:.0f} us"
    if len(known) < len(errors):
        text += (
            f"; the clocks of {len(errors) - len(known)} processes are their hosts' own, since no "
            "messages tell more"
        )
    if about["dropped"]:
        text += f"; {about['dropped']} older events were dropped"
    if about["missing"]:
        named = ", ".join(map(str, about["missing"]))
        text += f"; missing: rank {named}, whose process wrote nothing (killed?)"
    return text
