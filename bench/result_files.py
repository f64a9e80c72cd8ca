"""The files of a measurement: its figures as JSON, and the document made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def save(stem: Path, found: Mapping[str, Any], document: str) -> None:
    """Writes STEM.json and STEM.md, and their directory if need be."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    stem.with_suffix(".md").write_text(document, encoding="utf-8")
