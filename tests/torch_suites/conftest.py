"""Torch's own tests, over gradwire: `make test-with WHAT=torch-suites`."""

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests that their module's QUICK does not name; raises UsageError for stale names."""
    modules = {item.module: set(getattr(item.module, "QUICK", ())) for item in items}
    for item in items:
        quick = modules[item.module]
        if quick and item.name not in quick:
            item.add_marker(pytest.mark.nightly)
    if any("::" in each for each in config.args):
        return
    stale = set().union(*modules.values()) - {item.name for item in items}
    if stale:
        raise pytest.UsageError(f"QUICK names no test: {', '.join(sorted(stale))}")
