"""Threads that authenticate peers, beside which the program may fork."""

from __future__ import annotations

import contextlib
import threading

from gradwire import _core
from gradwire._errors import Error


class AuthenticatingThread(threading.Thread):
    """A daemon thread that uses libcrypto, and frees what that holds for it before it ends.

    Else libcrypto does so behind Python's back, when the thread has let go of the interpreter's
    lock: a child forked then finds a lock of libcrypto held for ever.
    """

    def run(self) -> None:
        """Runs the target."""
        try:
            super().run()
        finally:
            with contextlib.suppress(Error):  # there is no libcrypto
                _core.end_libcrypto_thread()
