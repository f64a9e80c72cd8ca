"""Runs stages: programs that print rows, each in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from time import monotonic
from typing import IO, Any

from tests.gpu.build import ROOT

_TOO_LATE = 5.0  # seconds, in which no stage gets anywhere
SECONDS = "SECONDS"  # in a command: those that the stage has

Row = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A program."""

    name: str
    command: Sequence[str]
    seconds: float  # that it may take, besides what those before it have left of theirs
    wave: int = 0  # those of one number run side by side
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # stages that must have passed


@dataclass
class Ended:
    """What a stage told."""

    name: str
    seconds: float
    rows: list[Row] = field(default_factory=list)  # of checks
    times: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # the last lines of its standard error

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(row["passed"] for row in self.rows)

    @property
    def succeeded(self) -> bool:
        """Whether all checks were made, and passed."""
        return self.passed and self.complete

    @property
    def complete(self) -> bool:
        """Whether the time was enough for all checks."""
        return not any(row.get("incomplete") for row in self.rows)


def python(program: str, *arguments: str) -> list[str]:
    """The command of a program, as in "tests.gpu.loopback"."""
    return [sys.executable, "-u", "-m", program, *arguments]


def chosen(every: Sequence[Stage], only: Sequence[str], always: Sequence[str] = ()) -> list[Stage]:
    """Those of these names, and `always`; all where no names are given. Raises SystemExit."""
    unknown = set(only) - {each.name for each in every}
    if unknown:
        names = ", ".join(each.name for each in every)
        raise SystemExit(f"gpu: no stage {', '.join(sorted(unknown))}; there are {names}")
    return [each for each in every if not only or each.name in (*only, *always)]


def status(ended: Sequence[Ended]) -> int:
    """To exit with: 1 where a check failed, 2 where none failed but some were not made."""
    if not all(each.passed for each in ended):
        return 1
    return 0 if all(each.complete for each in ended) else 2


class Deadline:
    """The deadline of all stages together."""

    def __init__(self, seconds: float) -> None:
        self._end = monotonic() + seconds

    def remaining(self) -> float:
        """Seconds."""
        return self._end - monotonic()


def needed(all_of_them: Sequence[Stage]) -> float:
    """Seconds that they may take, wave after wave."""
    return sum(max(stage.seconds for stage in wave) for wave in _waves(all_of_them))


def _waves(all_of_them: Sequence[Stage]) -> list[list[Stage]]:
    return [list(wave) for _, wave in groupby(all_of_them, key=lambda stage: stage.wave)]


def run_all(
    all_of_them: Sequence[Stage],
    deadline: Deadline,
    base: Mapping[str, str],
    told: Callable[[str], object],
    save: Callable[[Sequence[Ended]], object] = lambda ended: None,
) -> list[Ended]:
    """Wave after wave, and nobody takes what those after it may need.

    What the deadline leaves no time for, or ends, is incomplete. `save` gets all that have ended
    after each wave.
    """
    ended: list[Ended] = []
    waves = _waves(all_of_them)
    for number, wave in enumerate(waves):
        others = sum(map(needed, waves[number + 1 :]))
        spare = deadline.remaining() - others - needed(wave)
        with ThreadPoolExecutor(len(wave)) as pool:
            begun = partial(
                _run, before=list(ended), spare=spare, deadline=deadline, base=base, told=told
            )
            ended += pool.map(begun, wave)
        save(ended)
    return ended


def _run(
    stage: Stage,
    before: Sequence[Ended],
    spare: float,
    deadline: Deadline,
    base: Mapping[str, str],
    told: Callable[[str], object],
) -> Ended:
    own, left = stage.seconds + max(0, spare - 1), deadline.remaining() - 1
    lacking = [each.name for each in before if each.name in stage.needs and not each.succeeded]
    if lacking:
        ended = Ended(stage.name, 0, [_incomplete(f"it needs {lacking[0]!r}, which did not pass")])
    elif left < _TOO_LATE:
        ended = Ended(stage.name, 0, [_incomplete("no time was left")])
    else:
        told(f"{stage.name} (up to {min(own, left):.0f} s)")
        ended = run(stage, min(own, left), base)
    told(f"{stage.name}: {summary(ended)}")
    if not ended.passed:
        told("\n".join(ended.errors))
    return ended


def summary(ended: Ended) -> str:
    """A line for people."""
    failed = [row for row in ended.rows if not row["passed"]]
    checks = sum(row.get("checks", 0) for row in ended.rows)
    incomplete = [row for row in ended.rows if row.get("incomplete")]
    if incomplete and not failed:
        return f"INCOMPLETE after {checks} checks: {incomplete[0]['detail']}"
    skipped = [row for row in ended.rows if row.get("skipped")]
    if skipped and not failed and not checks:
        return f"skipped: {skipped[0]['detail']}"
    if failed:
        first = failed[0]
        detail = " ".join(str(first["detail"]).split())
        return f"{len(failed)} groups FAILED, first {first['group']} {first['case']}: {detail}"
    return f"{checks} checks passed in {ended.seconds:.1f} s"


def run(stage: Stage, seconds: float, base: Mapping[str, str]) -> Ended:
    """Its rows; that it crashed or told nothing is one that failed.

    One that ran out of time is incomplete: it may be slow, or hang.
    """
    ended = Ended(stage.name, 0)
    start = monotonic()
    late = threading.Event()
    command = [f"{seconds:.0f}" if each == SECONDS else each for each in stage.command]
    with (
        tempfile.TemporaryFile() as errors,
        _started(command, {**base, **stage.environment}, errors) as process,
    ):
        timer = threading.Timer(seconds, _kill, (process, late))
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                _read(line.decode(errors="replace"), ended)
            process.wait()
        finally:
            timer.cancel()
            timer.join()
            _kill(process)
        ended.seconds = monotonic() - start
        why = _why(process.returncode, seconds if late.is_set() else None, ended)
        errors.seek(0)
        ended.errors = errors.read().decode(errors="replace").strip().splitlines()[-60:]
        if why:
            row = _incomplete if late.is_set() else _failed
            ended.rows.append(row(" | ".join([why, *ended.errors[-4:]])))
    return ended


def _started(
    command: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes], late: threading.Event | None = None) -> None:
    """With everything that it has started."""
    if late is not None:
        late.set()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(line: str, ended: Ended) -> None:
    """One of JSON is a row, or a time; others are somebody's chatter."""
    if not line.startswith("{"):
        return
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return
    (ended.rows if "passed" in row else ended.times).append(row)


def _why(status: int, late: float | None, ended: Ended) -> str:
    """How it ended, if not well."""
    if late is not None:
        last = f", last of {ended.rows[-1]['group']} {ended.rows[-1]['case']}" if ended.rows else ""
        return f"ran out of its {late:.0f} s{last}"
    if status != 0:
        return f"ended with status {status}"
    return "" if ended.rows else "it told nothing"


def _failed(why: str) -> Row:
    return {"group": "the stage", "case": "", "passed": False, "checks": 1, "detail": why}


def _incomplete(why: str) -> Row:
    fields = {"group": "the stage", "case": "", "passed": True, "checks": 0}
    return {**fields, "incomplete": True, "detail": why}
