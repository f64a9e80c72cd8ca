"""Checks of argument types; each raises InvalidArgument, which names the argument."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np

from gradwire._errors import InvalidArgument

_T = TypeVar("_T")


def whole(value: Any, what: str, *, least: int | None = None, bits: int = 32) -> int:
    """Checks an integer, also NumPy's or torch's but no bool: in `bits`, at least `least`."""
    try:
        given = operator.index(value)
    except (TypeError, ValueError):
        raise wrong(value, what, "an integer") from None
    if isinstance(value, bool):
        raise wrong(value, what, "an integer")
    if least is not None and given < least:
        raise InvalidArgument(f"{what}={given} is less than {least}")
    if not -(2 ** (bits - 1)) <= given < 2 ** (bits - 1):
        raise InvalidArgument(f"{what}={given} does not fit {bits} bits")
    return given


def number(value: Any, what: str) -> float:
    """Checks a real number, also NumPy's but no bool; NaN and infinity are numbers."""
    if type(value) is float:  # an isinstance of the abstract class costs 1 µs
        return value
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise wrong(value, what, "a number")
    try:
        return float(value)
    except OverflowError:  # an int above 1e308
        raise InvalidArgument(f"{what}={_shown(value)} is too large") from None


def seconds(value: Any, what: str = "timeout") -> float:
    """Checks a positive number of seconds, also NumPy's."""
    given = number(value, what)
    if not given > 0:
        raise InvalidArgument(f"{what}={value!r} is not a positive number of seconds")
    return given


def flag(value: Any, what: str) -> bool:
    """Checks True or False, also NumPy's."""
    if not isinstance(value, bool | np.bool_):
        raise wrong(value, what, "True or False")
    return bool(value)


def text(value: Any, what: str) -> str:
    """Checks a str."""
    return instance(value, what, str, "a str")


def instance(value: Any, what: str, kind: type[_T], wanted: str) -> _T:
    """Checks an object of the class `kind`; `wanted` says what to give instead."""
    if not isinstance(value, kind):
        raise wrong(value, what, wanted)
    return value


def items(value: Any, what: str, wanted: str) -> list[Any]:
    """Checks a list, tuple, set or other collection, but no str or bytes; returns its items."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | bytearray):
        raise wrong(value, what, wanted)
    return list(value)


def wrong(value: Any, what: str, wanted: str) -> InvalidArgument:
    """The error for a value of the wrong type."""
    if isinstance(value, type):
        kind = f"{value.__name__} is a class"
    else:
        kind = "None" if value is None else f"{_shown(value)} is of type {type(value).__name__}"
    return InvalidArgument(f"{what}={kind}: give {wanted}")


def _shown(value: Any) -> str:
    """A repr of at most 80 characters on one line, even of a value whose repr raises."""
    try:
        shown = repr(value)
    except Exception:
        shown = "<...>"
    return " ".join(shown.split())[:80]
