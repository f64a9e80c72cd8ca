"""Mutants of the files that have tests to run."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import NamedTuple

from tests.mutants.python.operators import Change, changes
from tests.mutants.python.selection import TESTS


class Mutant(NamedTuple):
    """One changed file."""

    path: str  # in python/gradwire
    source: bytes
    change: Change

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests for this file."""
        return TESTS[next(each for each in TESTS if self.path.startswith(each))]

    @property
    def diff(self) -> list[str]:
        """The lines that differ, without context."""
        before = self.source.decode().splitlines()
        after = self.change.of(self.source).decode().splitlines()
        lines = difflib.unified_diff(before, after, lineterm="", n=0)
        return [each for each in lines if not each.startswith(("---", "+++", "@@"))]

    @property
    def place(self) -> str:
        """Its file and line."""
        return f"{self.path}:{self.source[: self.change.start].count(10) + 1}"

    @property
    def key(self) -> tuple[str, str]:
        """Its place in EQUIVALENT."""
        return self.path, " ".join(each[1:].strip() for each in self.diff)


def mutants(package: Path, only: str) -> list[Mutant]:
    """All mutants of files whose path fits."""
    paths = sorted(str(each.relative_to(package)) for each in package.rglob("*.py"))
    return [
        Mutant(path, source, change)
        for path in paths
        if path.startswith(tuple(TESTS)) and re.search(only, path)
        for source in [(package / path).read_bytes()]
        for change in changes(source)
    ]
