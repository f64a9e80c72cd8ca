"""Whether this process replaces one that failed, as its launcher says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from gradwire._base import environment
from gradwire._errors import JobOver

_Made = TypeVar("_Made")


def joins() -> bool:
    """Whether `gradwire run --min` started this process anew, so that it must join the others."""
    return environment.flag("GRADWIRE_JOIN")


def joined(join: Callable[[], _Made]) -> _Made:
    """Returns what `join` does; ends the program, with exit code 0, when it came too late to join.

    Nothing has failed then: what it was started for is done.
    """
    try:
        return join()
    except JobOver as error:
        print(f"gradwire: {error}", file=sys.stderr, flush=True)
        raise SystemExit(0) from None
