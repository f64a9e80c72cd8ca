"""A process that outlives the launcher, only to end what that leaves behind.

The kernel kills a rank whose launcher dies (PR_SET_PDEATHSIG), but not what the rank has started,
such as data loaders. So the launcher tells the watcher of each process group that it starts and
ends. The end of that pipe, however the launcher ended, says that the groups left are nobody's, and
the watcher kills them. What has left its group by setsid() is its own.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

_SCRIPT = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    number = int(line)
    groups.add(number) if number > 0 else groups.discard(-number)
for each in groups:
    try:
        os.killpg(each, signal.SIGKILL)
    except OSError:
        pass
"""


class Watcher:
    """Kills the process groups that it was told of, if this process ends before they do."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            start_new_session=True,  # whoever kills the launcher's group must not end it
        )

    def add(self, group: int) -> None:
        """Tells it of a group that was started."""
        self._tell(group)

    def discard(self, group: int) -> None:
        """Tells it of a group that has ended, or may go on."""
        self._tell(-group)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            self._process.stdin.write(b"%d\n" % number)
            self._process.stdin.flush()
