"""Torch's own tests, over gradwire: `make test-torch-suites`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Ranks import the test modules by name, in a process that does not share pytest's path.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")])
)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the processors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        quick = getattr(item.module, "QUICK", None)
        if quick is not None and item.name not in quick:
            item.add_marker(pytest.mark.nightly)
