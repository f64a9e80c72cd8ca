"""The files of a measurement: its figures as JSON, and the document made of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"


def save(stem: Path, found: Mapping[str, Any], document: str) -> None:
    """Writes STEM.json and STEM.md, and their directory if need be."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    beside(stem, ".json").write_text(json.dumps(found, indent=1) + "\n")
    beside(stem, ".md").write_text(document, encoding="utf-8")


def save_runs(stem: Path, runs: Path, document: str) -> None:
    """Copies a file of runs to STEM-runs.jsonl if it is another, and writes STEM.md."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    beside(stem, ".md").write_text(document, encoding="utf-8")
    if runs.resolve() != beside(stem, "-runs.jsonl").resolve():
        shutil.copyfile(runs, beside(stem, "-runs.jsonl"))


def beside(stem: Path, suffix: str) -> Path:
    """STEM and a suffix; a stem may have a dot in it."""
    return stem.with_name(stem.name + suffix)
