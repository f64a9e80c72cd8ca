"""The user namespace of this process, in which one user id may stand for many users."""

from __future__ import annotations

import os

_OVERFLOW_ID = "/proc/sys/kernel/overflowuid"
_MAP = "/proc/self/uid_map"
_WHOLE_MAP = ["0", "0", str(2**32 - 1)]  # all ids, as in the first namespace


def stands_for_all_unmapped() -> bool:
    """Whether the kernel reports users that have no id in this namespace by this process's id.

    That is the overflow id, 65534, which is a user like others where every user has an id.
    """
    return os.geteuid() == int(_read(_OVERFLOW_ID) or 65534) and _read(_MAP).split() != _WHOLE_MAP


def _read(path: str) -> str:
    """The text of a file; empty without one."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
