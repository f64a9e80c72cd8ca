"""The ranks of a benchmark: processes that measure together, and rank 0 writes what they found."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOUND = "found.json"  # what rank 0 writes, in the directory that `--meet` names
_LIMIT = 1800.0  # seconds

Starter = Callable[[Callable[[], Any]], Any]


def run(
    module: str,
    arguments: Sequence[str],
    ranks: int,
    setting: Mapping[str, str],
    starters: Sequence[Starter] | None = None,
) -> dict[str, Any]:
    """What the ranks found, which run the module with `--meet DIRECTORY` and these arguments.

    Each starter starts one rank somewhere; without them all run here. Raises RuntimeError as soon
    as one has failed.
    """
    with tempfile.TemporaryDirectory() as meet, contextlib.ExitStack() as stack:
        common = {"WORLD_SIZE": str(ranks), "GRADWIRE_SECRET": secrets.token_hex()}
        environment = {**os.environ, **common, "OMP_NUM_THREADS": "1", **setting}
        command = [sys.executable, "-m", module, "--meet", meet, *arguments]
        processes = []
        for rank, starter in enumerate(starters or [_here] * ranks):
            variables = {**environment, "RANK": str(rank)}
            process = starter(lambda env=variables: subprocess.Popen(command, env=env))
            stack.callback(process.kill)
            processes.append(process)
        _await(processes)
        found: dict[str, Any] = json.loads((Path(meet) / FOUND).read_text())
        return found


def write(meet: str, found: Mapping[str, Any]) -> None:
    """Hands over what the ranks found; rank 0 calls it."""
    (Path(meet) / FOUND).write_text(json.dumps(found))


def _here(start: Callable[[], Any]) -> Any:
    return start()


def _await(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _LIMIT
    while any(each.poll() is None for each in ranks):
        if any(each.poll() for each in ranks) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    codes = [each.poll() for each in ranks]
    if codes != [0] * len(ranks):
        raise RuntimeError(f"the ranks ended with {codes}; None is one that did not end")
