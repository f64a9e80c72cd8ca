"""What the operators make of a small source, and what the list of equivalents must name."""

from __future__ import annotations

from tests.mutants.cpp.operators import mutants_of
from tests.mutants.cpp.programs import PROGRAMS
from tests.mutants.cpp.sample import _equivalents
from tests.mutants.cpp.trial import ROOT

_SOURCE = """\
#include <a> // 1 < 2
int f(int a) {
  const int b = a + 3;  // a && b
  if (!a && b < a) return 0x10;
  g(a, true);
  h("1 + 2", 'x');
  return 7;
}
"""


def _changes() -> set[tuple[str, str, str]]:
    return {(each.operator, *each.lines(_SOURCE)) for each in mutants_of("f.cc", _SOURCE)}


def test_every_operator_changes_code_alone() -> None:
    declared, condition = "const int b = a + 3; // a && b", "if (!a && b < a) return 0x10;"
    called, quoted = "g(a, true);", "h(\"1 + 2\", 'x');"
    assert _changes() == {
        ("swap", declared, declared.replace("+", "-")),
        ("constant", declared, declared.replace("3", "2")),
        ("constant", declared, declared.replace("3", "4")),
        ("negation", condition, condition.replace("!", "")),
        ("swap", condition, condition.replace("&&", "||")),
        ("swap", condition, condition.replace("<", "<=")),
        ("drop", condition, ";"),
        ("swap", called, called.replace("true", "false")),
        ("drop", called, ";"),
        ("order", f"{condition} {called}", f"{called} {condition}"),
        ("drop", quoted, ";"),
        ("order", f"{called} {quoted}", f"{quoted} {called}"),
        ("constant", "return 7;", "return 6;"),
        ("constant", "return 7;", "return 8;"),
    }


def test_every_mutant_changes_its_file() -> None:
    for file in PROGRAMS:
        text = ROOT.joinpath(file).read_text()
        mutants = mutants_of(file, text)
        assert mutants
        assert len({each.apply(text) for each in mutants}) == len(mutants)
        assert all(each.apply(text) != text for each in mutants)


def test_listed_equivalents_are_mutants_of_the_sources() -> None:
    made = {
        (file, *each.lines(text))
        for file, text in ((each, ROOT.joinpath(each).read_text()) for each in PROGRAMS)
        for each in mutants_of(file, text)
    }
    assert _equivalents() <= made, "the sources have changed: list anew what is left of these"


def test_listed_programs_are_tests() -> None:
    names = {each.stem for each in ROOT.glob("tests/cpp/*/*_test.cc")}
    assert {each for programs in PROGRAMS.values() for each in programs} <= names
