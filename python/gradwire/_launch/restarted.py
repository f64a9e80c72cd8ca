"""Whether this process replaces one that failed, as its launcher says."""

from __future__ import annotations

from gradwire._base import environment


def joins() -> bool:
    """Whether `gradwire run --min` started this process anew, so that it must join the others."""
    return environment.flag("GRADWIRE_JOIN")
