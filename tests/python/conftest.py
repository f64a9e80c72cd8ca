"""Fixtures that several files use, and the order of tests."""

from __future__ import annotations

import os
import signal
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
    lines = (folder / "nightly.txt").read_text().splitlines()
    prefixes = {each: False for each in lines if not each.startswith("#")}
    files = set()
    for item in items:
        if not item.path.is_relative_to(folder):
            continue
        file = item.path.relative_to(folder).as_posix()
        files.add(file)
        for prefix in prefixes:
            if f"{file}::{item.name}".startswith(prefix):
                item.add_marker(pytest.mark.nightly)
                prefixes[prefix] = True
    named = {each.split("::")[0] for each in prefixes}
    files |= {each for each in named if not (folder / each).is_file()}
    stale = [each for each, fits in prefixes.items() if not fits and each.split("::")[0] in files]
    if whole_files and stale:
        raise pytest.UsageError(f"nightly.txt names no test: {', '.join(stale)}")
