"""`pytest bench/collectives --benchmark-only` does what users of pytest-benchmark expect."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT

ROOT = Path(__file__).parents[3]
NAME = "test_bandwidth[shm-p2-all_reduce-ring-1KiB]"


def suite(storage: Path, *options: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(ROOT / "bench/collectives"),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    command += ["--rootdir", str(ROOT), "-q", "-p", "no:cacheprovider", "--benchmark-only"]
    command += [
        "-k",
        "all_reduce-ring and 1KiB and shm-p2",
        f"--benchmark-storage=file://{storage}",
    ]
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    ended = subprocess.run(
        [*command, *options], env=alone, capture_output=True, text=True, timeout=LIMIT
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved run, which is also in one.json."""
    folder = tmp_path_factory.mktemp("benchmarks")
    suite(folder / "storage", "--benchmark-save=one", f"--benchmark-json={folder / 'one.json'}")
    return folder


def test_json_has_bandwidths_under_stable_names(saved: Path):
    (found,) = json.loads((saved / "one.json").read_text())["benchmarks"]
    assert found["fullname"].endswith(f"test_bandwidth.py::{NAME}")
    info, median = found["extra_info"], found["stats"]["median"]
    assert (info["ranks"], info["bytes"]) == (2, 1024)
    assert info["algbw_GBps"] == pytest.approx(1024 / median / 1e9, rel=1e-3)
    assert info["busbw_GBps"] == pytest.approx(info["algbw_GBps"])  # 2(p-1)/p is 1 at p = 2


def test_a_run_is_compared_with_a_saved_one_and_drawn(saved: Path):
    options = ["--benchmark-compare=0001", "--benchmark-compare-fail=median:1000000%"]
    drawn = importlib.util.find_spec("pygal") is not None
    options += [f"--benchmark-histogram={saved / 'drawn'}"] if drawn else []
    said = suite(saved / "storage", *options)
    assert f"{NAME} (NOW)" in said
    assert f"{NAME} (0001_one)" in said
    assert len(list(saved.glob("drawn*.svg"))) == drawn
