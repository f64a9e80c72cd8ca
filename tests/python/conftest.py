"""Fixtures that several files use, and the order of tests."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest
from gradwire._base.environment import VARIABLES

# Before torch is imported: a fork of a process that has OpenMP's threads hangs in its next parallel
# region, and on few cores these threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A rank that compiles starts processes that import torch, for minutes on a busy machine: one for
# each core to compile in, and one for each of the processor's vector extensions to try it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A shell's background job ignores Ctrl-C, and so would all ranks.
signal.signal(signal.SIGINT, signal.default_int_handler)

LAUNCHERS = (
    "RANK",
    "WORLD",
    "LOCAL_",
    "MASTER_",
    "OMPI_",
    "PMI",
    "MPI_",
    "SLURM_",
    "TORCHELASTIC_",
)


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of a launcher, nor of gradwire."""
    for name in list(os.environ):
        if name in VARIABLES or name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture
def job_secret(monkeypatch: pytest.MonkeyPatch) -> str:
    """A secret for all processes of the test, without which no store is opened over TCP."""
    secret = "0123456789abcdef"
    monkeypatch.setenv("GRADWIRE_SECRET", secret)
    return secret


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of `nightly.txt`, and moves those that are marked `long` to the front."""
    chosen = config.getoption("lf", False) or any("::" in each for each in config.args)
    mark_nightly(items, whole_files=not chosen)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def mark_nightly(items: list[pytest.Item], *, whole_files: bool) -> None:
    """Marks the tests of `nightly.txt`; raises UsageError for lines that fit no test."""
    folder = Path(__file__).parent
    lines: dict[Path, list[str]] = defaultdict(list)
    for line in (folder / "nightly.txt").read_text().splitlines():
        if not line.startswith("#"):
            lines[folder / line.partition("::")[0]].append(line)
    fitting = set()
    for item in items:
        for line in lines.get(item.path, ()):
            if item.name.startswith(line.partition("::")[2]):
                item.add_marker(pytest.mark.nightly)
                fitting.add(line)
    collected = {item.path for item in items}
    looked_at = [each for each in lines if each in collected or not each.is_file()]
    stale = [line for each in looked_at for line in lines[each] if line not in fitting]
    if whole_files and stale:
        raise pytest.UsageError(f"nightly.txt names no test: {', '.join(stale)}")
