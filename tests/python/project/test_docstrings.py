"""Docstrings begin with what a function does or what a thing is: with a verb or a noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import gradwire
import pytest

PACKAGE = Path(gradwire.__file__).parent

# A sentence that begins with one of these names its subject late, or never.
PREPOSITIONS = """about above across against along among around as at before behind below beside
besides between beyond by down during except for from in inside into like near of off on onto out
outside over past per since through to toward towards under until up upon via with within without
after"""
PRONOUNS = """he her hers him his how it its itself me mine my our ours she that their theirs them
these they this those us we what whatever when where which whichever who whoever whom whose why
you your"""
CONJUNCTIONS = "also and because but else if nor or so than though unless yet"
BANNED = set(f"{PREPOSITIONS} {PRONOUNS} {CONJUNCTIONS}".split())
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def first_word(docstring: str) -> str:
    found = re.search(r"[A-Za-z]+", docstring)
    return found[0].lower() if found else ""


def faults(source: str) -> Iterator[str]:
    """The docstrings of a source text that do not begin as they should."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            line, name = getattr(node, "lineno", 1), getattr(node, "name", "module")
            if first_word(text) in BANNED:
                yield f"{line}: {name}: {text.splitlines()[0]}"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    assert not list(faults(path.read_text(encoding="utf-8")))


def test_a_docstring_that_begins_with_a_preposition_is_found() -> None:
    assert list(faults('def f():\n    """Of two numbers, the sum."""\n')) == [
        "1: f: Of two numbers, the sum."
    ]
    assert list(faults('class C:\n    """Which rank it is."""\n')) == ["1: C: Which rank it is."]
    assert not list(faults('def f():\n    """The sum of two numbers."""\n'))
