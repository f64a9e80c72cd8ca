"""The name of a job that MPICH's Hydra has started: where its mpiexec listens.

The environment has no name that is the same on all hosts. On each host mpiexec starts a proxy with
`--control-port HOST:PORT --pgid NUMBER`, where it listens as long as the job lives, and the proxy
starts the ranks. The name of the job's key-value space, for which PMI-1 has a question
(`get_my_kvsname`), would do as well, but who asks on PMI_FD counts as an MPI process, and Hydra
kills the job when such a one ends without MPI_Finalize.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path


def job_name() -> str | None:
    """The job's name, from the nearest proxy among this process's ancestors; None without one."""
    for words in _command_lines():
        options = dict(itertools.pairwise(words))
        if "proxy" in os.path.basename(words[0]) and "--control-port" in options:
            return f"{options['--control-port']}/{options.get('--pgid', '0')}"
    return None


def _command_lines() -> Iterator[list[str]]:
    """The command lines of this process's ancestors, the nearest first."""
    pid = os.getppid()
    while pid > 0:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            # The command, in parentheses, may have spaces; the state and the parent follow.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended, or is another user's
            return
        yield words
