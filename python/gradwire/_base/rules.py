"""Rules by name: pairs of a pattern and a choice; the first pattern that matches decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from gradwire._base.arguments import wrong
from gradwire._errors import InvalidArgument

_T = TypeVar("_T")


def choose(name: str, rules: Sequence[tuple[str, _T]]) -> _T:
    """The choice of the first rule whose pattern matches; the last rule's pattern is "*"."""
    return next(choice for pattern, choice in rules if fnmatchcase(name, pattern))


def require_pairs(rules: Any) -> None:
    """Raises InvalidArgument unless `rules` is a list of pairs of a pattern and something."""
    wanted = "a list of pairs of a pattern and a codec: [('*.bias', 'none')]"
    if isinstance(rules, Mapping):
        raise InvalidArgument(f"rules={dict(rules)!r} is a mapping: give {wanted}")
    if not isinstance(rules, list | tuple):
        raise wrong(rules, "rules", wanted)
    for each in rules:
        if not (isinstance(each, list | tuple) and len(each) == 2 and isinstance(each[0], str)):
            raise InvalidArgument(f"rules= holds {each!r}: give {wanted}")


def require_matches(
    rules: Sequence[tuple[str, Any]], names: Iterable[str], whose: str = "named_parameters()"
) -> None:
    """Raises InvalidArgument for a rule whose pattern matches no parameter."""
    known = list(names)
    for pattern, _ in rules:
        if not any(fnmatchcase(name, pattern) for name in known):
            some = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
            raise InvalidArgument(
                f"rules= has the pattern {pattern!r}, which matches no parameter; their names are "
                f"those of {whose}: {some}"
            )
