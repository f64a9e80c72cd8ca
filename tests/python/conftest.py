"""Fixtures that several files use."""

from __future__ import annotations

import os

import pytest
from gradwire._environment import VARIABLES

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
