"""Makes the mutants of a C++ source that clang-format has formatted."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# What is no code: comments, preprocessor lines, strings and characters.
_NO_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.S | re.M
)
_PAIRS = [("<", "<="), (">", ">="), ("+", "-"), ("+=", "-="), ("&&", "||"), ("true", "false")]
_SWAPS = {**dict(_PAIRS), **{other: one for one, other in _PAIRS}}
_SWAPPED = re.compile(r"(?<=\s)(?:[<>]=?|[+-]=?|&&|\|\|)(?=\s)|\b(?:true|false)\b")
_CONSTANT = re.compile(r"(?<![\w.'])\d+(?=[uUlL]*(?![\w.']))")
_NEGATION = re.compile(r"!(?=[\w(*:])")
# A declaration cannot be dropped where it is used, nor a return where there must be a value.
_CONTROL = re.compile(r"(?:if|for|while|else|do)\b")
_KEPT = re.compile(
    r"(?:return|break|continue|case|default|using|namespace|class|struct|template|friend|throw"
    r"|public|private|static_assert|const|constexpr|static|inline|explicit|virtual|auto)\b"
    r"|[\w:]+(?:<[^;=()]*>)?[\s&*]+\w+\s*(?:[=;,({\[]|$)"
)
_ASSIGNED = re.compile(r"[\w.>\[\]-]+(?= [|+]?= )")


class Mutant(NamedTuple):
    """One change of a file: text[first:last] becomes `new`."""

    file: str
    operator: str
    first: int
    last: int
    new: str

    def apply(self, text: str) -> str:
        """Returns the changed text."""
        return text[: self.first] + self.new + text[self.last :]

    def lines(self, text: str) -> tuple[str, str]:
        """Returns the changed lines, as they were and as they are, each pressed into one."""
        first = text.rfind("\n", 0, self.first) + 1
        last = text.find("\n", self.last)
        now = text[first : self.first] + self.new + text[self.last : last]
        return " ".join(text[first:last].split()), " ".join(now.split())

    def diff(self, text: str) -> str:
        """Returns a unified diff."""
        was, now = (each.splitlines(keepends=True) for each in (text, self.apply(text)))
        return "".join(difflib.unified_diff(was, now, self.file, f"{self.file} ({self.operator})"))


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Returns all mutants of a file, in order."""
    code = _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    return sorted([*_tokens(file, code, text), *_statements(file, code, text)], key=lambda m: m[2:])


def _tokens(file: str, code: str, text: str) -> Iterator[Mutant]:
    for found in _SWAPPED.finditer(code):
        line = text[text.rfind("\n", 0, found.start()) + 1 : text.find("\n", found.end())]
        if '"' not in line or found[0] not in "+=-=":  # texts have no difference
            yield Mutant(file, "swap", *found.span(), _SWAPS[found[0]])
    for found in _NEGATION.finditer(code):
        yield Mutant(file, "negation", *found.span(), "")
    for found in _CONSTANT.finditer(code):
        for value in (int(found[0]) - 1, int(found[0]) + 1):
            if value >= 0:
                yield Mutant(file, "constant", *found.span(), str(value))


def _statements(file: str, code: str, text: str) -> Iterator[Mutant]:
    before: tuple[int, int] | None = None  # the statement in front of this one
    for first, last in _spans(code):
        statement = code[first:last]
        if not _CONTROL.match(statement) and _KEPT.match(statement):
            before = None
            continue
        yield Mutant(file, "drop", first, last, ";")
        if (
            before
            and not code[before[1] : first].strip()
            and _meet(code[slice(*before)], statement)
        ):
            one, between = text[slice(*before)], text[before[1] : first]
            yield Mutant(file, "order", before[0], last, text[first:last] + between + one)
        before = (first, last)


def _meet(one: str, other: str) -> bool:
    """Returns whether the order of two statements may matter: not of assignments to two places."""
    places = [_ASSIGNED.match(each) for each in (one, other)]
    apart = all(places) and places[0][0] not in other and places[1][0] not in one
    return not apart and not other.startswith("else")


def _spans(code: str) -> Iterator[tuple[int, int]]:
    """Finds the statements that end with a semicolon and hold no block."""
    begin, depth = 0, 0
    for at, each in enumerate(code):
        depth += (each in "([") - (each in ")]")
        if each not in "{};" or (each == ";" and depth > 0):
            continue
        first = at - len(code[begin:at].lstrip())
        if each == ";" and first < at and code[first] not in ")],":
            yield first, at + 1
        begin, depth = at + 1, 0
