"""Which mutants a module has, and that the tables name files and mutants that there are."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.python import sample
from tests.mutants.python.operators import changes
from tests.mutants.python.selection import EQUIVALENT, TESTS
from tests.mutants.python.trees import ROOT

PACKAGE = ROOT / "python/gradwire"


def mutants(source: str) -> list[str]:
    return [each.of(source.encode()).decode() for each in changes(source.encode())]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("f(a < b)", ["pass", "f((a <= b))"]),
        ("x = a + b", ["x = (a - b)"]),
        ("x = a and b", ["x = (a or b)"]),
        ("x = y[1]", ["x = y[2]"]),
        ("x = f(a, b=c, d=e)", ["x = f(a, d=e)", "x = f(a, b=c)"]),
        ("x.y = z", ["pass"]),
        ("if a: raise b", ["if (not (a)): raise b", "if a: pass"]),
        ("if not a: f.g += h", ["if (a): f.g += h", "if not a: pass", "if not a: f.g -= h"]),
        ("x = 'ü' if a else b", ["x = 'ü' if (not (a)) else b"]),
        ("LIMIT = 3", []),
        ("class A:\n LIMIT = -1 << 20", []),
        ("x = zip(a, b, strict=True)", []),
        ("_log.info('x', y=1)", []),
        ("x = f'{a + 1}'", []),
        ("def f(x: int = None) -> A[1]: 'text'", []),
    ],
)
def test_a_mutant_has_one_change(source: str, wanted: list[str]) -> None:
    assert sorted(mutants(source)) == sorted(wanted)


def test_mutants_are_python_and_differ() -> None:
    source = (PACKAGE / "_calls/objects.py").read_text()
    found = mutants(source)
    assert len({source, *found}) == len(found) + 1 > 50
    for each in found:
        ast.parse(each)


def test_tables_name_what_there_is() -> None:
    files = [str(each.relative_to(PACKAGE)) for each in PACKAGE.rglob("*.py")]
    assert [each for each in TESTS if not any(path.startswith(each) for path in files)] == []
    tests = {each for some in TESTS.values() for each in some if not each.startswith("-")}
    assert [each for each in tests if not (ROOT / "tests/python" / each).exists()] == []
    paths = {path for path, _ in EQUIVALENT}
    known = {each.key for path in paths for each in sample.mutants(PACKAGE, f"^{path}$")}
    assert [each for each in EQUIVALENT if each not in known] == []
