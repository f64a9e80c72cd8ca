"""Fixtures that several files use, and the order of tests."""

from __future__ import annotations

import os
import signal

import pytest
from gradwire._base.environment import VARIABLES

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the tests that are marked `long` to the front."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
