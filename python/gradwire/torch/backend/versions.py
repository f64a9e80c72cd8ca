"""Versions of torch that the backend tells apart."""

from __future__ import annotations

import re

OLDEST = (2, 7)  # before, torch's C++ side drops the Python half of a Work
FIRST_WITH_BACKENDS = (2, 14)  # takes a subclass of Backend for each device of a group


def parse(version: str) -> tuple[int, int]:
    """The first two numbers of a version, such as torch.__version__."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else OLDEST
