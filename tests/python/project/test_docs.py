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
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


# From PyPI, which does not have it.
FROM_PYPI = re.compile(r"""pip3? install (?:-\S+ )*["']?gradwire(?![\w-])""")


def test_nothing_is_said_to_come_from_pypi():
    assert FROM_PYPI.search("needs PyTorch: pip install 'gradwire[torch]'")
    folders = ("python", "csrc", "bench", "docs", "examples", "tests")
    files = [each for folder in folders for each in (ROOT / folder).rglob("*.*")]
    files = [each for each in files if each.suffix in (".py", ".md", ".cc")]
    texts = {*ROOT.glob("*.md"), *files} - {Path(__file__)}
    assert len(texts) > 500
    found = [each for each in texts if FROM_PYPI.search(each.read_text(encoding="utf-8"))]
    assert found == []


def test_the_glossary_is_in_order_and_defines_no_word_of_the_developers():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles == sorted(titles, key=lambda each: each.casefold().replace("_", " "))
    developers = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Glossary")[1]
    rows = re.findall(r"^\| ([^|]+) \|", developers, re.MULTILINE)[1:]
    words = {word for row in rows for word in row.split(", ")}
    assert len(words) > 20
    assert words & {word for title in titles for word in title.split(", ")} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each.name)
def test_links_to_the_glossary_lead_to_words(document: Path):
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in titles}
    linked = re.findall(r"glossary\.md#([\w-]+)\)", document.read_text(encoding="utf-8"))
    if document.name == "glossary.md":
        linked = re.findall(r"\]\(#([\w-]+)\)", text)
        assert linked
    assert set(linked) <= anchors
