"""The documentation names everything that is public, and its links lead to files."""

from __future__ import annotations

import re
from pathlib import Path

import gradwire
import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\.\. auto\w+:: gradwire\.(\w+)", text, re.MULTILINE))
    assert named >= set(gradwire.__all__)
    for module in ("gradwire.codec", "gradwire.torch"):  # which bring all of their names
        assert re.search(rf"^\.\. automodule:: {module}\n   :members:$", text, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each.name)
def test_links_lead_to_files(document: Path):
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.S | re.M)
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", text)
    assert [each for each in links if not (document.parent / each).exists()] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800
