"""Threads that authenticate peers, beside which the program may fork."""

from __future__ import annotations

import contextlib
import threading

from gradwire import _core
from gradwire._errors import Error


class AuthenticatingThread(threading.Thread):
    """A thread that uses libcrypto.

    Before it ends it frees the memory that libcrypto keeps for it, while it holds the GIL.
    Otherwise libcrypto would free it after the GIL is released, and a process that is forked
    meanwhile would inherit a lock of libcrypto that stays held.
    """

    def run(self) -> None:
        """Runs the target."""
        try:
            super().run()
        finally:
            with contextlib.suppress(Error):  # there is no libcrypto
                _core.end_libcrypto_thread()
