"""Waiting for children where SIGCHLD is ignored, as it may be inherited through exec.

Then the kernel reaps every child itself: nobody learns how one ended, and a wait for one lasts
until all have ended (wait(2), "Linux notes").
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator

_DEFAULT, _IGNORED = 0, 1  # SIG_DFL and SIG_IGN


@contextlib.contextmanager
def children_are_kept() -> Iterator[None]:
    """Lets this process learn how its children end during the block; they inherit that."""
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    handle = ctypes.CDLL(None).signal  # Python's own is for the main thread alone
    handle.argtypes, handle.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    handle(signal.SIGCHLD, _DEFAULT)
    try:
        yield
    finally:
        handle(signal.SIGCHLD, _IGNORED)
